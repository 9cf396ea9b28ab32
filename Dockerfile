# gpt fit, gpt serve and the other commands, for a CPU: docker build -t minimal-gpt .
# For NVIDIA GPUs: docker build -t minimal-gpt --build-arg TORCH=--cuda .
# In a folder with a text: docker run --rm -v "$PWD:/work" -u "$(id -u):$(id -g)" minimal-gpt fit --data.corpus my.txt
FROM python:3.13-slim

# Text is written faster on a CPU by a program that this compiler builds.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml constraints.txt lock.txt README.md LICENSE ./
COPY scripts/install.py scripts/
COPY configs configs
COPY data data
COPY gpt gpt
ARG TORCH=--cpu
RUN PIP_NO_CACHE_DIR=1 python scripts/install.py /venv --extras serve "$TORCH"

# What is kept between runs is beside them; any user may be chosen with --user.
ENV PATH=/venv/bin:$PATH GPT_CACHE=/work/.cache
RUN useradd --uid 1000 --create-home gpt && install --directory --owner gpt /work
USER gpt
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["gpt"]
CMD ["--help"]

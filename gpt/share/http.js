// The server computes.
const backend = {
  own: "the checkpoint that is served",
  live: true,  // the run may still train

  async request(path, form, signal) {
    const key = $("key").value, body = form && JSON.stringify(form);
    const headers = { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
    const response = await fetch(path, { method: form ? "POST" : "GET", headers, body, signal });
    if (response.ok) return response;
    if (response.status === 401) $("key_field").hidden = false;
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? "the server answered " + response.status);
  },

  async ask(path, form) { return (await this.request(path, form)).json(); },

  async complete(form, take, signal) {
    const response = await this.request("v1/completions", form, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let buffer = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (buffer + value).split("\n\n");
      buffer = lines.pop();
      for (const line of lines) {
        const data = line.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        take(event.choices[0]);
      }
    }
  },
};
start();

// The backend of `gpt serve`'s page: the server computes. Its API is in gpt/serve/app.py.
const backend = {
  own: "the checkpoint that is served",
  live: true,  // the run may still train

  // The server's response; an Error with its message if it refuses.
  async request(path, form, signal) {
    const key = $("key").value;
    const headers = { "content-type": "application/json" };
    if (key) headers.authorization = "Bearer " + key;
    const method = form ? "POST" : "GET";
    const body = form && JSON.stringify(form);
    const response = await fetch(path, { method, headers, body, signal });
    if (response.ok) return response;
    if (response.status === 401) $("key_field").hidden = false;
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? "the server answered " + response.status);
  },

  async ask(path, form) {
    const response = await this.request(path, form);
    return response.json();
  },

  // Read server-sent events, each `data: ` and JSON, until `data: [DONE]`.
  async complete(form, take, signal) {
    const response = await this.request("v1/completions", form, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (buffer + value).split("\n\n");
      buffer = events.pop();  // it may go on
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const { choices, error } = JSON.parse(data);
        if (error) throw new Error(error.message);
        take(choices[0]);
      }
    }
  },
};
start();

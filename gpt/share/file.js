// A worker computes, with the weights in this file.
const backend = {
  own: "the model in this file",
  worker: new Worker(URL.createObjectURL(new Blob([$("engine").textContent, "answer(self, FILE);"]))),
  calls: new Map(),  // of each call that is open, what takes its messages
  count: 0,

  async *call(path, form, signal) {
    if (path !== "load") await this.loaded;
    const id = this.count++, messages = [];
    let wake = null;
    this.calls.set(id, message => { messages.push(message); wake?.(); });
    signal?.addEventListener("abort", () => this.worker.postMessage({ id, stop: true }));
    this.worker.postMessage({ id, path, form });
    for (;;) {
      while (!messages.length) await new Promise(resolve => { wake = resolve; });
      const { value, error, done } = messages.shift();
      if (done) this.calls.delete(id);
      if (error) throw new Error(error);
      if (value !== undefined) yield value;
      if (done) return;
    }
  },

  async ask(path, form) {
    for await (const value of this.call(path, form)) return value;
  },

  complete(form, signal) { return this.call("complete", form, signal); },

  // Hand the blocks to the worker as the browser reads them.
  async load() {
    if (typeof FILE === "undefined") throw new Error("This file is damaged: get it again.");  // the browser refused it
    $("progress").hidden = false;
    for (const index of FILE.blocks.keys()) {
      while (document.readyState === "loading" && !$("block" + (index + 1))) await new Promise(resume => setTimeout(resume, 20));
      const block = $("block" + index);
      await this.ask("load", { index, text: block?.textContent ?? "" });
      block?.remove();
      $("progress").value = (index + 1) / FILE.blocks.length;
    }
    $("progress").hidden = true;
  },
};
backend.worker.onmessage = ({ data }) => backend.calls.get(data.id)?.(data);
backend.worker.onerror = showError;
backend.loaded = backend.load();
start();

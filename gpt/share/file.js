// A worker computes, with the weights in this file.
const backend = {
  own: "the model in this file",
  worker: new Worker(URL.createObjectURL(new Blob([$("engine").textContent, "answer(self, FILE);"]))),

  async *call(path, form, signal) {
    if (path !== "load") await this.loaded;
    const { port1, port2 } = new MessageChannel(), messages = [];
    let wake = null;
    port1.onmessage = ({ data }) => { messages.push(data); wake?.(); };
    signal?.addEventListener("abort", () => port1.postMessage("stop"));
    this.worker.postMessage({ path, form }, [port2]);
    for (;;) {
      while (!messages.length) await new Promise(resolve => { wake = resolve; });
      const { value, error, done } = messages.shift();
      if (error) throw new Error(error);
      if (done) return;
      yield value;
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
    for (let index = 0; index < FILE.blocks; index++) {
      while (document.readyState === "loading" && !$("block" + (index + 1))) await new Promise(resume => setTimeout(resume, 20));
      const block = $("block" + index);
      await this.ask("load", { text: block?.textContent ?? "" });
      block?.remove();
      $("progress").value = (index + 1) / FILE.blocks;
    }
    $("progress").hidden = true;
  },
};
backend.worker.onerror = showError;
backend.loaded = backend.load();
start();

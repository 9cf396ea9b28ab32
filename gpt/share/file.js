// The backend of an exported file: a worker of the browser computes, with the weights in the file. worker.js
// has what it answers.
const backend = {
  own: "the model in this file",
  worker: new Worker(URL.createObjectURL(new Blob([$("engine").textContent, "answer(self, FILE);"]))),

  /**
   * The worker's answer to a request.
   * @param {string} path a method of its Writer
   * @param {object} [form]
   * @param {function(object): void} [take] gets each choice of a completion
   * @param {AbortSignal} [signal] ends a completion
   */
  async ask(path, form, take, signal) {
    if (path !== "load") await this.loaded;
    signal?.throwIfAborted();  // it was stopped while the file was read
    const { port1, port2 } = new MessageChannel();
    signal?.addEventListener("abort", () => port1.postMessage("stop"));
    this.worker.postMessage({ path, form }, [port2]);
    return new Promise((resolve, reject) => {
      port1.onmessage = ({ data: { choice, error, value } }) => {
        if (choice) take(choice);
        else if (error) reject(new Error(error));
        else resolve(value);
      };
    });
  },

  complete(form, take, signal) {
    return this.ask("complete", form, take, signal);
  },

  // Hand the blocks to the worker as the browser reads them.
  async load() {
    const isRefused = typeof FILE === "undefined";  // by the browser, because the script is not as it was
    if (isRefused) throw new Error("This file is damaged: get it again.");
    $("progress").hidden = false;
    for (let index = 0; index < FILE.blocks; index++) {
      await this.waitForBlock(index);
      const block = $("block" + index);
      await this.ask("load", { text: block?.textContent ?? "" });
      block?.remove();
      $("progress").value = (index + 1) / FILE.blocks;
    }
    $("progress").hidden = true;
  },

  // Wait until the browser has read a block to its end: the next one begins, or the file has ended.
  async waitForBlock(index) {
    while (document.readyState === "loading" && !$("block" + (index + 1))) {
      await new Promise(resume => setTimeout(resume, 20));
    }
  },
};
backend.worker.onerror = showError;
backend.loaded = backend.load();
start();

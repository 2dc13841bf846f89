/* Browsers start no worker for pages that are opened from a folder. There, a hidden frame runs the script of the search. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.document.write("<!doctype html><body></body>");
      this.scope.document.close();
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.scope.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach(data => this.postMessage(data));
      };
      this.scope.document.body.append(script);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() { this.scope.frameElement.remove(); }
  };
  window.Worker = window.IFrameWorker;
}

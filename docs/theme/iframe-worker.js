// Search runs in a worker, which browsers refuse to pages opened from a folder (file:).
// There a hidden frame does its work. On a server the browser's own worker is used.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const target = new URL(url, document.baseURI).href;
      // The script calls postMessage as a worker does: what it says goes to the page.
      frame.srcdoc = `<script>postMessage = data => parent.dispatchEvent(
        new CustomEvent("frame-worker", {detail: {data, from: "${target}"}}))</script>
        <script src="${target}"></script>`;
      this.ready = new Promise(done => frame.addEventListener("load", done));
      this.frame = frame;
      window.addEventListener("frame-worker", ({detail}) => {
        if (detail.from !== target) return;
        const event = new MessageEvent("message", {data: detail.data});
        this.dispatchEvent(event);
        this.onmessage?.(event);
      });
      document.documentElement.append(frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

// What came of the reader's own deeds, said aloud politely and shown for a while.

import { html, signal } from "./html.js";

const words = signal({ text: "", bad: false });
let timer = 0;

export function say(text, bad = false) {
  clearTimeout(timer);
  words.value = { text, bad };
  timer = setTimeout(() => (words.value = { text: "", bad: false }), bad ? 12_000 : 5_000);
}

export function Said() {
  const { text, bad } = words.value;
  return html`<div role="status" aria-live="polite" class="said ${bad ? "bad" : ""} ${text ? "" : "empty"}">
    ${text}
  </div>`;
}

// Lines to copy, with a button that does it; ``secret`` is put in place of ``instead`` then.

import { html, useState } from "./html.js";
import { say } from "./said.js";

export function Copy({ text, label, secret = "", instead = "" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(secret ? text.replaceAll(instead, secret) : text);
      setDone(true);
      say("Copied.");
      setTimeout(() => setDone(false), 2000);
    } catch {
      say("This browser does not allow copying; select the lines instead.");
    }
  };
  return html`<div class="copy">
    <pre tabindex="0" aria-label=${label}>${text}</pre>
    <button type="button" onClick=${copy} aria-label=${`Copy: ${label}`}>${done ? "Copied" : "Copy"}</button>
  </div>`;
}

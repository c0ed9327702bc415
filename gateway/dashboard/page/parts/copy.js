// Lines to copy, with a button that does it.

import { html, useState } from "./html.js";
import { say } from "./said.js";

export function Copy({ text, label }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
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

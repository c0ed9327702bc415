// A button whose deed has a price: it asks once, in its own place. Red, unless it is `mild`.

import { html, useEffect, useRef, useState } from "./html.js";

export function Confirm({ label, question, yes, no: stay = "Keep it", act, disabled, mild }) {
  const [asking, ask] = useState(false);
  const [busy, setBusy] = useState(false);
  const no = useRef(null);
  const first = useRef(null);
  useEffect(() => void (asking && no.current?.focus()), [asking]);
  const leave = () => {
    ask(false);
    requestAnimationFrame(() => first.current?.focus());
  };
  const sure = async () => {
    setBusy(true);
    await act();
    setBusy(false);
    ask(false);
  };
  if (!asking) {
    return html`<button type="button" class=${mild ? "" : "danger"} ref=${first} disabled=${disabled} onClick=${() => ask(true)}>
      ${label}
    </button>`;
  }
  return html`<span
    class="confirm"
    role="group"
    aria-label=${question}
    onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), leave())}
  >
    <span>${question}</span>
    <button type="button" class=${mild ? "" : "danger solid"} disabled=${busy} onClick=${sure}>${yes}</button>
    <button type="button" ref=${no} onClick=${leave}>${stay}</button>
  </span>`;
}

// A bar of parts within a budget, with its marks; what it shows is also said in words.

import { html } from "./html.js";

// parts: [{name, value, tone}]; marks: [{at, name}], all in the unit of ``total``.
export function Meter({ parts, total, marks = [], words, tall = false }) {
  const scale = (x) => `${Math.min(100, Math.max(0, (100 * x) / (total || 1)))}%`;
  return html`<div class="meter ${tall ? "tall" : ""}" role="img" aria-label=${words}>
    ${parts.map(
      (x) => html`<span class="part ${x.tone}" style=${{ width: scale(x.value) }} title=${x.name}></span>`,
    )}
    ${marks.map((x) => html`<span class="at" style=${{ left: scale(x.at) }} title=${x.name}></span>`)}
  </div>`;
}

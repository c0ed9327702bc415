// What moved just now: who fell asleep, who came back, and what that took.

import { html } from "../parts/html.js";
import { Since, Tier } from "../parts/badges.js";
import { moves, rowsVersion, titleOf } from "../live/store.js";
import { bytes, count } from "../live/format.js";

const SHOWN = 8;

export function Moves({ open }) {
  rowsVersion.value;
  const all = moves.value.slice(0, SHOWN);
  return html`<section class="card moves" aria-labelledby="moves">
    <h2 id="moves">Moves</h2>
    ${all.length === 0
      ? html`<p class="hint">None in the last hour. Conversations that fall asleep or come back are listed here.</p>`
      : html`<ul>
          ${all.map(
            (x) => html`<li key=${x.number}>
              <button type="button" class="link" title=${x.id} onClick=${() => open(x)}>${titleOf(x.tenant, x.id)}</button>
              <span class="way">${x.before ? html`<${Tier} name=${x.before} />` : html`<span class="mark none">new</span>`}<i aria-hidden="true">→</i><span class="sr"> to </span><${Tier} name=${x.after} /></span>
              <span class="words">${words(x)}</span>
              <time class="faint"><${Since} at=${x.at} /></time>
            </li>`,
          )}
        </ul>`}
  </section>`;
}

function words(x) {
  if (x.after === "hot") {
    if (!x.before) return `began with ${count(x.tokens)} tokens`;
    return x.event === "lost" ? `${count(x.tokens)} tokens, computed anew` : `back with ${count(x.tokens)} tokens`;
  }
  if (x.before !== "hot") return `${bytes(x.bytes)} moved`;
  return `${bytes(x.bytes)}${x.bf16_bytes > 1.05 * x.bytes ? `, in bf16 ${bytes(x.bf16_bytes)}` : ""}`;
}

// What moved just now: who fell asleep, who came back, and what that took.

import { html } from "../parts/html.js";
import { Since, Tier } from "../parts/badges.js";
import { moves } from "../live/store.js";
import { bytes, count } from "../live/format.js";

const SHOWN = 8;

export function Moves({ open }) {
  const all = moves.value.slice(0, SHOWN);
  return html`<section class="card moves" aria-labelledby="moves">
    <h2 id="moves">Moves</h2>
    ${all.length === 0
      ? html`<p class="hint">Conversations that fall asleep or come back are listed here as it happens.</p>`
      : html`<ul>
          ${all.map(
            (x) => html`<li key=${x.number}>
              <button type="button" class="link" onClick=${() => open(x.row)}>${x.row.id}</button>
              <span class="way">${x.from ? html`<${Tier} name=${x.from} />` : html`<span class="mark none">new</span>`}<i aria-hidden="true">→</i><span class="sr"> to </span><${Tier} name=${x.to} /></span>
              <span class="words">${words(x)}</span>
              <time class="faint"><${Since} at=${x.at} /></time>
            </li>`,
          )}
        </ul>`}
  </section>`;
}

function words({ row, from, to }) {
  if (to === "hot" && !from) return `began with ${count(row.tokens)} tokens`;
  if (!from) return `began, and sleeps: ${bytes(row.bytes)}`;
  if (to === "hot") return `${count(row.tokens)} tokens are back`;
  if (from === "hot") return `${bytes(row.bf16_bytes)} packed to ${bytes(row.bytes)}`;
  return `${bytes(row.bytes)} moved`;
}


// The gate: which codec packs sessions, what it was measured to cost, and the bound it must keep.

import { html, useState } from "../parts/html.js";
import { Meter } from "../parts/meter.js";
import { say } from "../parts/said.js";
import { call, ofModel } from "../live/api.js";
import { quality, server, TIER_NAMES } from "../live/store.js";
import { count, fixed, percent } from "../live/format.js";
import { Picture, Verdicts } from "./verdicts.js";

const FLOORS = new Set(["fp8", "q8"]); // what others do: measured beside ours, never used

export function Quality() {
  const it = quality.value;
  if (!it) return html`<p class="hint card">The engine has not reported its codecs yet.</p>`;
  return html`
    <section class="card" aria-labelledby="codecs">
      <h2 id="codecs">Codec in use</h2>
      <ul class="codecs">
        <li>${isExact(it) ? html`<b>${unpackedWords(it)}</b>` : html`<b>${it.name}</b> ${it.codec && html`<span class="codec">${it.codec}</span>`}`}</li>
      </ul>
      ${it.why && html`<p class="why-codec">${it.why}</p>`}
      <${Measuring} it=${it} />
    </section>
    ${it.rows.length ? html`<${Picture} rows=${it.rows} bound=${it.bound} /><${Measured} it=${it} />` : html`<p class="hint card">${isExact(it) ? `Sessions are stored exactly${it.measured ? "" : " until then"}: that costs no quality.` : "What this codec costs this model was not measured, or loses nothing: the words above say which."}</p>`}
    <${Verdicts} history=${it.history ?? []} />
  `;
}

const isExact = (it) => it.exact;

// What is so while nothing is packed, and what is to be expected.
export function unpackedWords(it) {
  const next = it?.expected ? `, then ${it.expected}` : "";
  const words = it?.progress ? `; ${it.progress}${next}` : "";
  return it?.measured === false ? `exact, not packed yet${words}` : "exact";
}

function Measuring({ it }) {
  const [busy, setBusy] = useState(false);
  const measure = async () => {
    setBusy(true);
    try {
      await call("POST", ofModel("admin/measure"));
      say("The engine measures in its idle moments; the codec changes without a restart.");
    } catch (error) {
      say(error.message, true);
    }
    setBusy(false);
  };
  const may = it.can_measure && server.value?.admin && !it.progress;
  if (!it.progress && !may) return "";
  return html`<div class="measuring">
    ${it.progress && html`<p role="status"><span class="spin" aria-hidden="true"></span>${it.progress}</p>${progressOf(it.progress)}
      ${it.measured === false && html`<span class="faint">In idle moments only: it hardly moves while requests are answered. A restart before the first verdict begins anew.</span>`}`}
    ${may && html`<button type="button" disabled=${busy} onClick=${measure}>Measure now</button>
      <span class="faint">Takes some minutes, while the engine is idle; requests do not wait for it.</span>`}
  </div>`;
}

function progressOf(words) {
  const found = /(\d+) of (\d+)/.exec(words);
  if (!found) return "";
  return html`<${Meter} parts=${[{ name: words, value: Number(found[1]), tone: "accent" }]} total=${Number(found[2])} words=${words} />`;
}

function Measured({ it }) {
  const { bound } = it;
  const rows = [...it.rows].sort((a, b) => (b.in_use - a.in_use) || a.bits_per_element - b.bits_per_element || a.context - b.context);
  const chains = rows.some((x) => x.chain_kl != null);
  return html`<section class="card" aria-labelledby="measured">
    <h2 id="measured">Measured on this model</h2>
    ${bound && html`<p class="hint">A codec serves only if KL stays under ${bound.kl}, ${percent(bound.top1)} of the most likely tokens stay, and no needle is lost${chains ? html`; at answers to reasoning chains KL under ${bound.chain_kl}, top-1 over ${percent(bound.chain_top1)}` : ""}. Bars end at the bound.</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Measured on this model"><table class="plain measured">
      <thead><tr><th scope="col">Codec</th><th scope="col" class="number">Context</th><th scope="col" class="number">Bits</th>
        <th scope="col">KL</th><th scope="col" class="number">Top-1</th>${chains && html`<th scope="col">KL, chains</th><th scope="col" class="number">Top-1, chains</th>`}
        <th scope="col" class="number">Needles</th><th scope="col" class="number">Δp</th><th scope="col" class="number">Restore</th><th scope="col">Verdict</th></tr></thead>
      <tbody>
        ${rows.map((x) => {
          const out = outside(x, bound);
          return html`<tr key=${`${x.codec_id} ${x.preset} ${x.context}`} class=${x.in_use ? "in-use" : ""}>
            <th scope="row">${x.preset}</th>
            <td class="number">${count(x.context)}</td>
            <td class="number">${fixed(x.bits_per_element, 2)}</td>
            <td><${Against} value=${x.kl} bound=${bound?.kl} /></td>
            <td class="number">${percent(x.top1)}</td>
            ${chains && html`<td><${Against} value=${x.chain_kl} bound=${bound?.chain_kl} /></td><td class="number">${percent(x.chain_top1)}</td>`}
            <td class="number">${x.needle_total ? `${x.needle_found} of ${x.needle_total}` : "–"}</td>
            <td class="number">${percent(x.delta_p)}</td>
            <td class="number">${x.restore_share != null ? html`<span title="time to unpack, in prefills of the same tokens">${percent(x.restore_share)}</span>` : "–"}</td>
            <td>${FLOORS.has(x.preset) ? html`<span class="faint">to compare with</span>` : out ? html`<span class="bad">refused: ${out}</span>` : html`<span class="ok">${x.in_use ? "in use" : "inside"}</span>`}</td>
          </tr>`;
        })}
      </tbody>
    </table></div>
    <p class="hint">Restore: time to unpack, as a share of computing the same tokens again. Δp: root mean square of what the probability of the text's own token changes.</p>
  </section>`;
}

function Against({ value, bound }) {
  if (value == null) return "–";
  const inside = bound == null || value <= bound;
  const said = value > 0 && value < 0.00005 ? value.toExponential(0) : fixed(value, 4); // never a false 0
  return html`<span class="against"><${Meter} parts=${[{ name: said, value, tone: inside ? "accent" : "over" }]} total=${bound || value || 1} words=${`${said}${bound ? ` against ${bound}` : ""}`} /> ${said}</span>`;
}

function outside(x, bound) {
  if (!bound) return "";
  if (x.kl > bound.kl) return "KL";
  if (x.top1 < bound.top1) return "top-1";
  if (x.needle_found < x.needle_total) return "needles";
  if (x.chain_kl != null && x.chain_kl > bound.chain_kl) return "chains";
  if (x.chain_top1 != null && x.chain_top1 < bound.chain_top1) return "chains";
  return "";
}

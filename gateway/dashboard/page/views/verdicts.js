// The gate in pictures: each preset's KL against the bound, and what was decided when.

import { html } from "../parts/html.js";
import { clock, count, fixed, plural } from "../live/format.js";

const LEAST = 1e-6; // nats; less is drawn here

// A line for each preset, a dot for each length, on a scale of powers of ten.
export function Picture({ rows, bound }) {
  const presets = Map.groupBy([...rows].sort((a, b) => a.bits_per_element - b.bits_per_element), (x) => x.preset);
  const values = rows.map((x) => Math.max(LEAST, x.kl)).concat(bound ? [bound.kl] : []);
  const low = Math.floor(Math.log10(Math.min(...values)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
  const at = (kl) => `${(100 * (Math.log10(Math.max(LEAST, kl)) - low)) / (high - low)}%`;
  const decades = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  return html`<section class="card" aria-labelledby="picture">
    <h2 id="picture">KL against the bound</h2>
    <div class="scatter" role="img" aria-label=${inWords(presets, bound)}>
      ${[...presets].map(
        ([name, points]) => html`<div class="line ${points.some((x) => x.in_use) ? "in-use" : ""}" key=${name}>
          <span class="name"><b>${name}</b> <span class="faint">${fixed(points[0].bits_per_element, 2)} bits</span></span>
          <span class="track">
            ${decades.map((x) => html`<i class="grid" style=${{ left: at(x) }}></i>`)}
            ${bound && html`<i class="bound" style=${{ left: at(bound.kl) }}></i>`}
            ${points.map((x) => html`<i class="dot ${bound && x.kl > bound.kl ? "over" : ""}" style=${{ left: at(x.kl) }} title=${`${name}: ${fixed(x.kl, 5)} at ${count(x.context)} tokens`}></i>`)}
          </span>
        </div>`,
      )}
      <div class="line scale"><span class="name faint">KL, nats</span><span class="track">
        ${decades.map((x, i) => html`<span class="tick faint ${i === 0 ? "first" : i === decades.length - 1 ? "last" : ""}" style=${{ left: at(x) }}>${x >= 0.001 ? x : x.toExponential(0)}</span>`)}
      </span></div>
    </div>
    <p class="hint">One dot for each length of context${bound ? html`; the red line is the bound, ${bound.kl}. What lies right of it is refused` : ""}.</p>
  </section>`;
}

function inWords(presets, bound) {
  const words = [...presets].map(([name, points]) => `${name} at most ${fixed(Math.max(...points.map((x) => x.kl)), 4)}`);
  return `KL of ${plural(presets.size, "codec")}: ${words.join(", ")}${bound ? `; the bound is ${bound.kl}` : ""}.`;
}

export function Verdicts({ history }) {
  if (history.length === 0) return "";
  return html`<section class="card" aria-labelledby="verdicts">
    <h2 id="verdicts">Codecs so far</h2>
    <ol class="verdicts">${[...history].reverse().map(
      (x, i) => html`<li key=${x.at}>
        <time class="faint">${day(x.at)} ${clock(x.at)}</time>
        <span><b>${x.codec.startsWith("raw") ? "exact" : x.codec.split(".")[0]}</b>${i === 0 ? html` <span class="ok">now</span>` : ""}${x.worst_kl != null ? html` <span class="faint">KL at most ${fixed(x.worst_kl, 4)}</span>` : ""}
          <span class="reason">${x.why}</span></span>
      </li>`,
    )}</ol>
    <p class="hint">Since this server began.</p>
  </section>`;
}

const day = (unix) => new Date(unix * 1000).toLocaleDateString("en-CA");

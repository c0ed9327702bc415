// Each tier against its budget, what it would take in bf16, and why turns found less than they might.

import { html } from "../parts/html.js";
import { Meter } from "../parts/meter.js";
import { leftWords, REASONS, sourceWords, tierOf } from "../parts/badges.js";
import { sum } from "../parts/strip.js";
import { unpackedWords } from "./quality.js";
import { memory, packed, quality, TIER_NAMES, TIERS } from "../live/store.js";
import { bytes, count, density, percent, plural } from "../live/format.js";

const RETURNS = ["hot", "cold-ram", "cold-disk", "cold-redis"];

export function Memory() {
  const it = memory.value;
  if (!it) return html`<p class="hint card">The server has not reported its memory yet.</p>`;
  return html`
    <section class="card" aria-labelledby="tiers">
      <h2 id="tiers">Tiers against their budgets</h2>
      <div class="budgets">
        <${Hot} hot=${it.hot} />
        ${it.tiers.map((x) => html`<${Cold} key=${x.name} tier=${x} />`)}
        ${it.repacking && html`<${Repacking} it=${it.repacking} />`}
      </div>
    </section>
    <${Departures} departures=${it.departures ?? {}} />
    <div class="halves">
      <${InBf16} it=${it} />
      <${Outcomes} outcomes=${it.outcomes ?? {}} />
    </div>
  `;
}

function Hot({ hot }) {
  const busy = Math.max(0, hot.bytes - hot.idle_bytes);
  const total = hot.capacity_bytes || hot.bytes || 1;
  const marks = hot.capacity_bytes
    ? [
        { at: hot.high_water * total, name: "high water: idle sessions are put to sleep from here" },
        { at: hot.low_water * total, name: "low water: until here" },
      ]
    : [];
  const parts = [
    { name: `in use: ${bytes(busy)}`, value: busy, tone: "hot" },
    { name: `idle: ${bytes(hot.idle_bytes)}`, value: hot.idle_bytes, tone: "hot pale" },
  ];
  return html`<article class="budget hot">
    <h3><span class="mark hot">Hot</span></h3>
    <p class="amount"><b>${bytes(hot.bytes)}</b>${hot.capacity_bytes ? ` of ${bytes(hot.capacity_bytes)}` : ""}</p>
    <${Meter} parts=${parts} total=${total} marks=${marks} tall words=${`Hot: ${parts.map((x) => x.name).join(", ")}`} />
    <p class="facts-line"><span><i class="hot"></i>in use ${bytes(busy)}</span><span><i class="hot pale"></i>idle ${bytes(hot.idle_bytes)}</span>
      ${hot.measuring_bytes ? html`<span>of it for measuring the model ${bytes(hot.measuring_bytes)}</span>` : ""}
      ${hot.save_queue_bytes ? html`<span>waiting to be packed ${bytes(hot.save_queue_bytes)}</span>` : ""}
      ${hot.capacity_bytes ? html`<span>marks at ${percent(hot.low_water)} and ${percent(hot.high_water)}</span>` : ""}</p>
  </article>`;
}

function Cold({ tier }) {
  const total = tier.capacity_bytes || tier.bytes || 1;
  return html`<article class="budget ${tier.name}">
    <h3><span class="mark ${tier.name}">${TIER_NAMES[tier.name]}</span> ${tier.codec && html`<span class="codec">${tier.codec.startsWith("raw") ? "exact" : tier.codec}</span>`}
      ${!tier.available && html`<span class="bad">down: sessions there are computed again meanwhile</span>`}</h3>
    <p class="amount"><b>${bytes(tier.bytes)}</b>${tier.capacity_bytes ? ` of ${bytes(tier.capacity_bytes)}` : ""}</p>
    <${Meter} parts=${[{ name: bytes(tier.bytes), value: tier.bytes, tone: tier.name }]} total=${total} tall
      words=${`${TIER_NAMES[tier.name]}: ${bytes(tier.bytes)}${tier.capacity_bytes ? ` of ${bytes(tier.capacity_bytes)}` : ""}`} />
    <p class="facts-line"><span>${plural(tier.sessions, "session")} asleep here</span>
      ${tier.hot_sessions ? html`<span>${plural(tier.hot_sessions, "copy", "copies")} of hot ones</span>` : ""}
      ${tier.profile_bytes ? html`<span>learned tables of its codec ${bytes(tier.profile_bytes)}</span>` : ""}
      ${tier.blobs != null && html`<span>${plural(tier.blobs, "chunk")}</span>`}
      ${tier.evictions != null && html`<span class=${tier.evictions ? "warn" : ""}>${plural(tier.evictions, "eviction")}${tier.evictions ? ": it ran out of room" : ""}</span>`}
      ${tier.errors ? html`<span class="bad">${plural(tier.errors, "error")}</span>` : ""}</p>
  </article>`;
}

// What was stored before its tier had a codec, or by an older release, is packed in idle moments.
function Repacking({ it }) {
  const { sessions_left: left, sessions_done: done } = it;
  if (!left && !done) return "";
  const freed = done ? `${bytes(it.freed_bytes)} freed so far` : "";
  const words = left
    ? `${plural(left, "session")} left to pack: ${bytes(it.bytes_left)}`
    : `${plural(done, "session")} stored unpacked ${done === 1 ? "is" : "are"} packed now`;
  return html`<article class="budget" aria-label="Packing again">
    <h3>Packing again, in idle moments</h3>
    <p class="amount"><b>${count(done)}</b> of ${plural(done + left, "session")}</p>
    <${Meter} parts=${[{ name: `packed: ${count(done)}`, value: done, tone: "ram" }]} total=${done + left} tall
      words=${`Packed again: ${count(done)} of ${plural(done + left, "session")}`} />
    <p class="facts-line"><span>${words}</span>${freed && html`<span>${freed}</span>`}</p>
  </article>`;
}

function Departures({ departures }) {
  const left = TIERS.filter((x) => departures[x]);
  return html`<section class="card" aria-labelledby="departures">
    <h2 id="departures">Why conversations left</h2>
    ${left.length === 0
      ? html`<p class="hint">None has left a place yet, since this server began.</p>`
      : html`<dl class="departures">${left.map(
          (x) => html`<div key=${x}><dt><span class="mark ${x}">${TIER_NAMES[x]}</span></dt><dd>${whys(departures[x])}</dd></div>`,
        )}</dl>`}
  </section>`;
}

const whys = (counts) =>
  Object.entries(counts)
    .sort((a, b) => b[1] - a[1])
    .map(([why, n]) => html`<span class="why"><b>${count(n)}</b> ${leftWords(why)}</span>`);

function InBf16({ it }) {
  const whole = it.bf16_bytes;
  const held = it.cold_bytes;
  const capacity = it.hot.capacity_bytes;
  return html`<section class="card" aria-labelledby="in-bf16">
    <h2 id="in-bf16">What it would take in bf16</h2>
    ${whole && !packed.value
      ? html`<p class="amount"><b>${bytes(held)}</b> stored, ${unpackedWords(quality.value)}.</p>`
      : whole
      ? html`<p class="amount"><b>${bytes(whole)}</b> in bf16, 16 bits for each value; packed it is ${bytes(held)}${held ? html`, <b>${density(whole / held)}</b>` : ""}.</p>
          <div class="compare">
            <span>bf16</span><${Meter} parts=${[{ name: bytes(whole), value: whole, tone: "bf16" }]} total=${Math.max(whole, held)} tall
              marks=${capacity && capacity < whole ? [{ at: capacity, name: `the hot budget: ${bytes(capacity)}` }] : []} words=${`in bf16: ${bytes(whole)}`} />
            <span>packed</span><${Meter} parts=${[{ name: bytes(held), value: held, tone: "ram" }]} total=${Math.max(whole, held)} tall words=${`packed: ${bytes(held)}`} />
          </div>
          ${capacity && whole > capacity ? html`<p class="hint">In bf16 hot memory alone would hold ${percent(capacity / whole)} of it; the rest would be computed again at every return.</p>` : ""}`
      : html`<p class="hint">Nothing is stored yet.</p>`}
  </section>`;
}

function Outcomes({ outcomes }) {
  const rows = [
    ...RETURNS.map((x) => ({ name: x, words: sourceWords(x), tone: tierOf(x), outcomes: outcomes[x] ?? {} })),
    { name: "miss", words: "missed", tone: "computed", outcomes: outcomes.miss },
    { name: "first", words: "first turn", tone: "computed", outcomes: outcomes.first },
  ].filter((x) => sum(x.outcomes));
  const all = rows.reduce((total, x) => total + sum(x.outcomes), 0);
  return html`<section class="card" aria-labelledby="outcomes">
    <h2 id="outcomes">Where prompts came from</h2>
    ${all === 0
      ? html`<p class="hint">No turn yet. Each one is counted here by where its prompt came from, and why not more of it was reused.</p>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Table of prompts"><table class="plain outcomes"><thead><tr><th scope="col">From</th><th scope="col" class="number">Turns</th><th scope="col" class="low1">Share</th><th scope="col">Why not more</th></tr></thead><tbody>
          ${rows.map((x) => {
            const n = sum(x.outcomes);
            return html`<tr key=${x.name}>
              <th scope="row"><span class="mark ${x.name === "first" ? "none" : x.tone}">${x.words}</span></th>
              <td class="number">${count(n)}</td>
              <td class="low1"><${Meter} parts=${[{ name: percent(n / all), value: n, tone: x.tone }]} total=${all} words=${percent(n / all)} /></td>
              <td class="faint">${x.name === "first" ? "there was nothing to return to" : reasons(x.outcomes)}</td>
            </tr>`;
          })}
        </tbody></table></div>`}
  </section>`;
}

function reasons(all) {
  const some = Object.entries(all).filter(([reason]) => reason);
  if (some.length === 0) return "all that was held was reused";
  return some
    .sort((a, b) => b[1] - a[1])
    .map(([reason, n]) => `${REASONS[reason] ?? reason} (${count(n)})`)
    .join("; ");
}

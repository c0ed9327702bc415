// Where all conversations are: hot, packed in RAM, on disk, in Redis; and what came back from each.

import { html } from "./html.js";
import { Meter } from "./meter.js";
import { REASONS } from "./badges.js";
import { memory, moves, places, TIER_NAMES, TIERS } from "../live/store.js";
import { bytes, count, plural } from "../live/format.js";

const SOURCE = { hot: "hot", ram: "cold-ram", disk: "cold-disk", redis: "cold-redis" };

export function Strip({ chosen, choose }) {
  const said = memory.value;
  const shown = TIERS.filter((x) => x === "hot" || x === "ram" || tierReport(said, x) || places.value[x].sessions);
  return html`<section class="strip" aria-label="Where conversations are">
    <ol style=${{ "--cells": shown.length + 1 }}>
      ${shown.map(
        (name) => html`<li key=${name}><${Cell} name=${name} said=${said} chosen=${chosen === name} choose=${choose} /></li>`,
      )}
      <li key="missed"><${Missed} outcomes=${said?.outcomes} chosen=${chosen === "miss"} choose=${choose} /></li>
    </ol>
  </section>`;
}

// What bars are shares of for a reader who does not get the budgets.
const allBytes = (said) =>
  said
    ? said.hot.bytes + said.tiers.reduce((total, x) => total + x.bytes, 0)
    : TIERS.reduce((total, x) => total + places.value[x].bytes, 0);
export const tierReport = (said, name) => said?.tiers?.find((x) => x.name === name);

function Cell({ name, said, chosen, choose }) {
  const { sessions, bytes: own } = places.value[name];
  const report = name === "hot" ? said?.hot : tierReport(said, name);
  const measuring = report?.measuring_bytes ?? 0; // for moments, while the model is measured
  const tables = report?.profile_bytes ?? 0; // what a codec has learned, however few the sessions
  const used = (report?.bytes ?? own) - measuring - tables;
  const capacity = report?.capacity_bytes;
  const notes = [returns(name, sum(said?.outcomes?.[SOURCE[name]])), tables && `tables ${bytes(tables)}`];
  const last = moves.value[0];
  const arrived = last?.after === name && last.before ? `arrived-${last.number % 2}` : "";
  return html`<button
    type="button"
    class="cell ${name} ${arrived}"
    aria-pressed=${chosen ? "true" : "false"}
    onClick=${() => choose(chosen ? "" : name)}
  >
    <span class="name">${TIER_NAMES[name]}</span>
    <span class="figure"><b>${count(sessions)}</b> ${sessions === 1 ? "session" : "sessions"}</span>
    <${Meter} parts=${[{ name: TIER_NAMES[name], value: used, tone: name }]} total=${capacity || allBytes(said) || 1}
      marks=${marks(name, report)} words=${`${TIER_NAMES[name]}: ${bytes(used)}`} />
    <span class="small">${bytes(used)}${capacity ? ` of ${bytes(capacity)}` : ""}${codec(report)}${measuring ? ` · ${bytes(measuring)} measuring` : ""}</span>
    <span class="small back">${report?.available === false ? "down now" : notes.filter(Boolean).join(" · ") || "\u00a0"}</span>
  </button>`;
}

const marks = (name, report) =>
  name === "hot" && report?.high_water && report.capacity_bytes
    ? [{ at: report.high_water * report.capacity_bytes, name: "high water" }]
    : [];

const codec = (report) => (report?.codec ? ` · ${report.codec.startsWith("raw") ? "exact" : report.codec.split(".")[0]}` : "");

function returns(name, back) {
  if (back === null) return "";
  return name === "hot" ? `${plural(back, "turn")} continued hot` : `${plural(back, "return")} from here`;
}

// A first turn returns to nothing and misses nothing: it is shown, but not counted as a return.
function Missed({ outcomes, chosen, choose }) {
  const missed = outcomes?.miss ?? {};
  const fresh = sum(outcomes?.first) ?? 0;
  const worst = Object.entries(missed).sort((a, b) => b[1] - a[1])[0];
  const all = sum(missed);
  const returns = Object.values(outcomes ?? {}).reduce((n, x) => n + sum(x), 0) - fresh;
  return html`<button
    type="button"
    class="cell missed"
    aria-pressed=${chosen ? "true" : "false"}
    onClick=${() => choose(chosen ? "" : "miss")}
  >
    <span class="name">Missed</span>
    <span class="figure"><b>${count(outcomes ? all : null)}</b>${returns ? ` of ${plural(returns, "return")}` : ""}</span>
    <${Meter} parts=${[{ name: "computed anew", value: all, tone: "computed" }]} total=${returns || 1}
      words=${`${all} of ${returns} returns found nothing to reuse`} />
    <span class="small">${[returns ? "" : "no return yet", fresh ? plural(fresh, "first turn") : ""].filter(Boolean).join(" · ") || "\u00a0"}</span>
    <span class="small back">${worst?.[0] ? `mostly: ${REASONS[worst[0]] ?? worst[0]}` : returns && !worst ? "each found something to reuse" : "\u00a0"}</span>
  </button>`;
}

export const sum = (reasons) =>
  reasons ? Object.values(reasons).reduce((total, n) => total + n, 0) : null;


// A session's way between the tiers over time: one lane for each, the newest at the right.

import { html } from "../parts/html.js";
import { isHot, serverTime, TIER_NAMES, TIERS, tick } from "../live/store.js";
import { ago, clock } from "../live/format.js";

const HOT = new Set(["active", "idle", "hibernating"]);
const WIDTH = 1000;
const LANE = 26;
const LEFT = 0;
const NEAR_S = 5; // a turn tells from which tier the wake before it came

export function Journey({ row, began, steps, turns }) {
  const until = Math.max(tick.value, serverTime());
  const stays = staysOf(row, began, steps, turns, until);
  if (stays.length === 0) return "";
  const lanes = TIERS.filter((x) => x === "hot" || stays.some((stay) => stay.place === x) || row.tier === x);
  const from = stays[0].from;
  const scale = scaleOf(stays, from, until);
  const height = lanes.length * LANE;
  return html`<section class="journey" aria-labelledby="journey">
    <h3 id="journey">Journey</h3>
    <div class="lanes">
      <div class="names" aria-hidden="true">${lanes.map((x) => html`<span>${TIER_NAMES[x]}</span>`)}</div>
      <svg viewBox=${`0 0 ${WIDTH} ${height}`} height=${height} preserveAspectRatio="none" role="img" aria-label=${inWords(stays, until)}>
        ${lanes.map((_, i) => html`<line class="lane" x1="0" x2=${WIDTH} y1=${(i + 0.5) * LANE} y2=${(i + 0.5) * LANE} />`)}
        ${stays.map((stay, i) => {
          const x = LEFT + scale(stay.from);
          const width = Math.max(3, scale(stay.to) - scale(stay.from));
          const y = lanes.indexOf(stay.place) * LANE;
          const next = stays[i + 1];
          return html`<g>
            <rect class="stay ${stay.place}" x=${x} y=${y + 7} width=${width} height=${LANE - 14} rx="3">
              <title>${TIER_NAMES[stay.place]} for ${ago(stay.to - stay.from)}, from ${clock(stay.from)}</title>
            </rect>
            ${next && html`<line class="step" x1=${scale(stay.to)} x2=${scale(stay.to)} y1=${y + LANE / 2} y2=${(lanes.indexOf(next.place) + 0.5) * LANE} />`}
          </g>`;
        })}
      </svg>
    </div>
    <p class="axis faint" aria-hidden="true"><span>${ago(until - from)} ago</span><span>now</span></p>
  </section>`;
}

// Places with their times, out of states. A sleep's tier comes with its step; where an older
// server left it out, the turn that ended the sleep has it, or the row.
function staysOf(row, began, steps, turns, until) {
  const stays = [];
  let asleep = "ram";
  for (const [i, step] of steps.entries()) {
    const to = steps[i + 1]?.at ?? until;
    let place = "hot";
    if (step.after === "cold") place = asleep = step.tier ?? wokenFrom(turns, steps, i) ?? (lastSleep(steps, i) ? (row.tier ?? asleep) : asleep);
    else if (step.after === "waking") place = asleep;
    else if (!HOT.has(step.after)) continue;
    const last = stays.at(-1);
    if (last?.place === place) last.to = to;
    else stays.push({ place, from: step.at, to });
  }
  if (stays.length === 0 && (isHot(row) || row.tier)) {
    const from = row.idle_since ?? began ?? until - 60;
    stays.push({ place: isHot(row) ? "hot" : row.tier, from: Math.min(from, until - 1), to: until });
  }
  return stays;
}

const lastSleep = (steps, i) => !steps.slice(i + 1).some((x) => x.after === "cold");

function wokenFrom(turns, steps, i) {
  const woken = steps.slice(i + 1).find((x) => x.after !== "cold");
  const turn = woken && turns.find((x) => Math.abs(x.at - woken.at) < NEAR_S);
  return turn?.source?.startsWith("cold-") ? turn.source.slice(5) : undefined;
}

// Long sleeps beside short turns: every stay has some width, the rest goes by the root of its time.
function scaleOf(stays, from, until) {
  const weights = stays.map((x) => 0.6 + Math.sqrt(Math.max(0.01, x.to - x.from)));
  const total = weights.reduce((sum, x) => sum + x, 0);
  let at = 0;
  const edges = stays.map((x, i) => ({ x, left: at, right: (at += (WIDTH * weights[i]) / total) }));
  return (time) => {
    const edge = edges.find(({ x }) => time <= x.to) ?? edges.at(-1);
    const length = edge.x.to - edge.x.from || 1;
    const share = Math.min(1, Math.max(0, (time - edge.x.from) / length));
    return edge.left + share * (edge.right - edge.left);
  };
}

function inWords(stays, until) {
  const last = stays.slice(-6).map((x) => `${TIER_NAMES[x.place]} for ${ago(x.to - x.from)}`);
  return `Where its KV has been in the last ${ago(until - stays[0].from)}: ${last.join(", then ")}.`;
}

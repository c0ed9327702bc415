// What happened to one session, step by step, the newest first: its states, its tier, and why.

import { html, useState } from "../parts/html.js";
import { leftWords } from "../parts/badges.js";
import { TIER_NAMES } from "../live/store.js";
import { clock, plural } from "../live/format.js";

const FEW = 6;
const EVENTS = {
  turn: "a turn came",
  wake: "is woken ahead of its next turn",
  woken: "is back",
  quiet: "the turn ended",
  hibernate: "goes to sleep",
  evicted: "fell asleep",
  kept: { idle: "stays awake", cold: "stays asleep" },
  restored: "is back",
  refused: "the turn was refused",
  lost: "its copy was gone",
  moved: "went to another tier",
};

const FELL_ASLEEP = new Set(["evicted", "moved"]); // steps that say where it rests from then on
const words = ({ event, after }) => EVENTS[event]?.[after] ?? EVENTS[event] ?? event;

export function Steps({ steps }) {
  const [all, setAll] = useState(false);
  if (steps.length === 0) return "";
  const newest = [...steps].reverse();
  const shown = all ? newest : newest.slice(0, FEW);
  return html`<section class="steps" aria-labelledby="steps">
    <h3 id="steps">Steps</h3>
    <ol>${shown.map(
      (x, i) => html`<li key=${`${x.at} ${i}`}>
        <time class="faint">${clock(x.at)}</time>
        <span>${words(x)}${FELL_ASLEEP.has(x.event) && x.tier ? html`, in <span class="mark ${x.tier}">${TIER_NAMES[x.tier]}</span>` : ""}${x.why && html`<span class="faint">: ${leftWords(x.why)}</span>`}</span>
        <span class="state faint">${x.after}</span>
      </li>`,
    )}</ol>
    ${steps.length > FEW && html`<button type="button" class="link" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${plural(steps.length, "step")}`}</button>`}
  </section>`;
}

// The last turns as bars: what of each prompt was still hot, what was restored, what was computed.

import { html } from "../parts/html.js";
import { Meter } from "../parts/meter.js";
import { isFirst, REASONS, Since, sourceWords, tierOf } from "../parts/badges.js";
import { count, seconds } from "../live/format.js";

const PARTS = { model: "the model", system: "the system message", tools: "the tools", messages: "the messages" };

export function Turns({ turns, prefix, known, serving }) {
  const newest = [...turns].reverse();
  const most = Math.max(1, ...newest.map((x) => x.prompt_tokens ?? 0));
  return html`<section class="turns" aria-labelledby="turns">
    <h3 id="turns">Last turns</h3>
    ${newest.length === 0
      ? html`<p class="hint">${!known ? "…" : serving ? "Its first turn here is being answered." : "This server has seen no turn of it: it slept through a restart, or belongs to another gateway."}</p>
          ${prefix?.prompt_tokens > 0 && html`<p class="faint">Its latest prompt: ${count(prefix.prompt_tokens)} tokens, ${count(prefix.cached_tokens)} of them reused.</p>`}`
      : html`<p class="legend"><span><i class="hot"></i>reused hot</span><span><i class="ram"></i><i class="disk"></i><i class="redis"></i>restored</span><span><i class="computed"></i>computed</span></p>
          <ol reversed>
            ${newest.map((turn) => html`<${Turn} key=${turn.at} turn=${turn} most=${most} />`)}
          </ol>`}
  </section>`;
}

function Turn({ turn, most }) {
  const restored = turn.restored_tokens ?? 0;
  const hot = (turn.reused_tokens ?? 0) - restored;
  const computed = turn.computed_tokens ?? 0;
  const parts = [
    { name: `${count(hot)} reused hot`, value: hot, tone: "hot" },
    { name: `${count(restored)} restored ${sourceWords(turn.source)}`.trim(), value: restored, tone: turn.source === "first" ? "ram" : tierOf(turn.source) },
    { name: `${count(computed)} computed`, value: computed, tone: "computed" },
  ].filter((x) => x.value > 0);
  return html`<li>
    <${Meter} parts=${parts} total=${most} words=${parts.map((x) => x.name).join(", ") || "nothing is known of its prompt"} tall />
    <time class="faint"><${Since} at=${turn.at} /></time>
    <p>
      <span>${isFirst(turn.source, turn.reason) ? "first turn" : sourceWords(turn.source) || turn.operation}</span>
      <span>${count(turn.prompt_tokens)} tokens${computed ? `, ${count(computed)} computed` : ""}</span>
      ${turn.first_token_s != null && html`<span>first token ${seconds(turn.first_token_s)}</span>`}
      ${turn.saved_s ? html`<span class="saved">saved ${seconds(turn.saved_s)}</span>` : ""}
    </p>
    ${(why(turn) || turn.error) && html`<p class="why">${turn.error ? `Failed: ${turn.error}. ` : ""}${why(turn)}</p>`}
  </li>`;
}

function why(turn) {
  const words = turn.reason && turn.source ? REASONS[turn.reason] ?? turn.reason : "";
  const where = parted(turn);
  if (isFirst(turn.source, turn.reason) && !where) return "";
  if (!words && !where) return "";
  if (where) return `${capital(where)}: the rest was computed again.`;
  return `${capital(words)}.`;
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

function parted({ changed, at_message }) {
  if (!changed) return "";
  if (changed === "messages") return `left the turn before at message ${(at_message ?? 0) + 1}`;
  return `${PARTS[changed] ?? changed} changed`;
}

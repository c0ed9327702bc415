// What the server does at this moment, and what it has saved today.

import { html } from "../parts/html.js";
import { Chart } from "../parts/chart.js";
import { Client, Since, Source } from "../parts/badges.js";
import { Meter } from "../parts/meter.js";
import { now, rows, rowsVersion, tenantRows, titleOf } from "../live/store.js";
import { bytes, count, plural, rate, saved, seconds } from "../live/format.js";
import { NoConversations } from "./chat.js";
import { Moves } from "./moves.js";
import { Tenants } from "./tenants.js";

const SPEEDS = [
  { name: "prompt tokens/s", of: "prompt", tone: "prompt", show: rate },
  { name: "answer tokens/s", of: "answer", tone: "accent", show: rate },
];

export function Now({ open }) {
  rowsVersion.value;
  const it = now.value ?? {};
  const requests = it.requests ?? [];
  return html`
    <dl class="figures">
      <${Figure} name="In flight" value=${count(it.running)} note=${waiting(it)} />
      <${Figure} name="Prompt" value=${rate(it.prompt_tokens_per_s)} unit="tokens/s" />
      <${Figure} name="Answers" value=${rate(it.answer_tokens_per_s)} unit="tokens/s" />
      ${it.memory_available_bytes != null && html`<${Figure} name="Memory free" value=${bytes(it.memory_available_bytes)} note="on this machine" />`}
      <${Figure} name="Prefill saved today" value=${saved(it.saved_s_today, it.saved_tokens_today)} good
        note=${it.saved_s_today == null ? "not computed again" : `${count(it.saved_tokens_today)} tokens not computed again`} />
      <${FirstToken} times=${it.first_token ?? {}} />
    </dl>
    ${rows.size === 0 && requests.length === 0 ? html`<${NoConversations} />` : ""}
    <section class="card" aria-labelledby="flight">
      <h2 id="flight">Requests in flight</h2>
      ${requests.length ? html`<${Requests} requests=${requests} open=${open} />` : html`<p class="hint">None at this moment.</p>`}
    </section>
    <div class="halves">
      <section class="card" aria-labelledby="speed">
        <h2 id="speed">Speed</h2>
        <${Chart} lines=${SPEEDS} label="Prompt and answer tokens per second over the last hour; the latest values are above." />
      </section>
      <${Moves} open=${open} />
    </div>
    <${Tenants} tenants=${tenantRows.value} />
  `;
}

const waiting = (it) => (it.waiting ? `${plural(it.waiting, "turn")} waiting` : "none waiting");

// The benefit in one figure: how soon a return from a tier begins to answer, against a first turn.
function FirstToken({ times: { restored, first } }) {
  if (!restored) return "";
  const note = first ? `first turns ${both(first)}` : `p95 ${seconds(restored.p95_s)}`;
  return html`<${Figure} name="First token of a return" value=${seconds(restored.p50_s)} good=${!first || restored.p50_s < first.p50_s} note=${note}
    title=${[sentence("Returns from a tier", restored), first && sentence("First turns", first)].filter(Boolean).join(" ")} />`;
}

const both = (x) => `${seconds(x.p50_s)}, p95 ${seconds(x.p95_s)}`;
const sentence = (name, x) =>
  `${name}: median ${both(x)}, over ${plural(x.turns, "stream")} with prompts of ${count(x.prompt_tokens)} tokens in the median.`;

export function Figure({ name, value, unit, note, good, title }) {
  return html`<div class="figure-card ${good ? "good" : ""}" title=${title}>
    <dt>${name}</dt>
    <dd><b>${value}</b>${unit && html` <span class="unit">${unit}</span>`}${note && html`<span class="note">${note}</span>`}</dd>
  </div>`;
}

const PHASES = { waiting: "in line", prefill: "reading the prompt", decode: "answering" };

function Requests({ requests, open }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="All of them"><table class="plain">
    <thead><tr><th scope="col">Session</th><th scope="col" class="low2">Client</th><th scope="col">Phase</th>
      <th scope="col" class="low1">Prompt from</th><th scope="col" class="number low1">Prompt</th><th scope="col" class="number">Answered</th><th scope="col" class="number">Since</th></tr></thead>
    <tbody>
      ${requests.map(
        (x) => html`<tr key=${x.id}>
          <th scope="row"><button type="button" class="link" onClick=${() => open({ id: x.session, tenant: x.tenant })} title=${x.session}>${titleOf(x.tenant, x.session)}</button></th>
          <td class="low2"><${Client} name=${x.client} /></td>
          <td><${Phase} request=${x} /></td>
          <td class="low1"><${Source} source=${x.source} reason=${x.reason} /></td>
          <td class="number low1">${count(x.prompt_tokens)}</td>
          <td class="number">${count(x.answered_tokens)}</td>
          <td class="number"><${Since} at=${x.started_at} /></td>
        </tr>`,
      )}
    </tbody>
  </table></div>`;
}

function Phase({ request: x }) {
  const words = PHASES[x.phase] ?? x.phase;
  if (x.phase !== "prefill" || !x.prompt_tokens || x.prefilled_tokens == null) return words;
  const share = x.prefilled_tokens / x.prompt_tokens;
  return html`<span class="progress"><${Meter} parts=${[{ name: words, value: share, tone: "accent" }]} total=${1}
    words=${`${Math.round(100 * share)} % of the prompt`} /> ${Math.round(100 * share)} %</span>`;
}

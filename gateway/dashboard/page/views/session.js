// One conversation: where its KV has been, what its last turns reused, and what can be done with it.

import { html, useEffect, useState } from "../parts/html.js";
import { Client, Source, Whereabouts } from "../parts/badges.js";
import { Confirm } from "../parts/confirm.js";
import { say } from "../parts/said.js";
import { Steps } from "./steps.js";
import { call, sessionPath } from "../live/api.js";
import { isHot, now, rowKey, TIER_NAMES } from "../live/store.js";
import { bytes, count, density, plural, saved } from "../live/format.js";
import { forgotten } from "./chat.js";
import { Journey } from "./journey.js";
import { Turns } from "./turns.js";

const ASK_AGAIN_MS = 250; // after a change, so that several of them cost one question

export function Session({ row, close }) {
  const detail = useDetail(row);
  return html`
    ${row.title && html`<p class="end">${row.id}</p>`}
    <p class="tags"><${Whereabouts} row=${row} /> ${row.client && html`<${Client} name=${row.client} />`}
      ${row.pinned && html`<span class="pin">pinned</span>`}
      ${row.parent && html`<span class="faint">started by ${row.parent}</span>`}
      ${row.tenant && html`<span class="faint">tenant ${row.tenant}</span>`}</p>
    <${Actions} row=${row} close=${close} />
    <dl class="facts">
      <dt>Tokens</dt><dd>${count(row.tokens)}</dd>
      <dt>${isHot(row) ? "Hot bytes" : row.ratio ? "Packed bytes" : "Bytes asleep"}</dt><dd>${bytes(row.bytes)}</dd>
      <dt>In bf16</dt><dd>${bytes(row.bf16_bytes)}</dd>
      <dt>Cold copy</dt><dd>${row.tier ? TIER_NAMES[row.tier] : "none yet"}${row.cold_bytes ? html` <span class="faint">${bytes(row.cold_bytes)}, ${density(row.ratio)}</span>` : ""}</dd>
      <dt>Last turn</dt><dd><${Source} source=${row.last_source} reason=${row.last_reason} /></dd>
      <dt>Prefill saved</dt><dd>${saved(row.saved_s, row.saved_tokens)}${row.turns ? html` <span class="faint">in ${plural(row.turns, "turn")}</span>` : ""}</dd>
    </dl>
    <${Journey} row=${row} began=${served(row)[0]?.started_at} steps=${detail?.timeline ?? []} turns=${detail?.last_turns ?? []} />
    <${Turns} turns=${detail?.last_turns ?? []} prefix=${detail?.prefix} known=${!!detail} serving=${served(row).length > 0} />
    <${Steps} steps=${detail?.timeline ?? []} />
  `;
}

// Asks for the rest of what is known whenever the row changes, but not with every change.
function useDetail(row) {
  const [detail, setDetail] = useState(null);
  useEffect(() => {
    let here = true;
    const ask = async () => {
      try {
        const said = await call("GET", sessionPath(row));
        if (here) setDetail(said);
      } catch (error) {
        if (here && error.status !== 404) say(error.message, true);
      }
    };
    const timer = setTimeout(ask, detail ? ASK_AGAIN_MS : 0);
    return () => ((here = false), clearTimeout(timer));
  }, [rowKey(row), row.state, row.turns, row.tier, served(row).length]);
  return detail;
}

// Tokens grow with every second of an answer; what is asked for here changes when a request ends.
const served = (row) =>
  (now.value?.requests ?? []).filter((x) => x.session === row.id && x.tenant === row.tenant);

function Actions({ row, close }) {
  const [busy, setBusy] = useState(false);
  const act = async (verb, done, body) => {
    setBusy(true);
    try {
      const said = await call(verb === "forget" ? "DELETE" : "POST", sessionPath(row, verb === "forget" ? "" : verb), body);
      say(done(said));
      if (verb !== "forget") return;
      forgotten(row.id);
      close();
    } catch (error) {
      say(error.message, true);
    } finally {
      setBusy(false);
    }
  };
  const asleep = (said) =>
    said?.state === "saving"
      ? `${row.id} is still being saved; it sleeps as soon as that is done.`
      : `${row.id} sleeps now${said?.tier ? `, in ${TIER_NAMES[said.tier]}` : ""}.`;
  const moved = (said) =>
    said?.tier === "ram" && said.state !== "saving" ? `${row.id} sleeps now, but in ${TIER_NAMES.ram}: the disk has not taken it.` : asleep(said);
  const awake = (said) =>
    said?.state === "cold" && said.tier // vLLM fills its blocks for a running request only
      ? `${row.id} is ready in ${TIER_NAMES[said.tier]}; this engine unpacks it with its next turn.`
      : `${row.id} is awake.`;
  const hot = isHot(row);
  const stays = whyItStays(row);
  const why = stays ? "why-it-stays" : undefined;
  const inUse = row.state === "active" || row.state === "waking";
  const gone = () => `${row.id} is forgotten${inUse ? "; the answer on its way still comes to its end" : ""}.`;
  return html`<div class="actions" role="group" aria-label="Actions">
    ${hot
      ? html`<button type="button" disabled=${busy || stays} aria-describedby=${why} onClick=${() => act("demote", asleep)}>Let it sleep</button>`
      : html`<button type="button" disabled=${busy || inUse} aria-describedby=${why} onClick=${() => act("prefetch", awake)}>Wake</button>`}
    ${row.tier === "ram" && !row.pinned && html`<button type="button" disabled=${busy || inUse} aria-describedby=${why} onClick=${() => act("demote", moved, { tier: "disk" })}>Move to disk</button>`}
    ${row.pinned
      ? html`<button type="button" disabled=${busy} onClick=${() => act("unpin", () => `${row.id} may sleep again.`)}>Unpin</button>`
      : html`<button type="button" disabled=${busy} onClick=${() => act("pin", () => `${row.id} is pinned: it stays as it is.`)}>Pin</button>`}
    <${Confirm} label="Forget" question="Remove it from every tier, for good?" yes="Forget it" disabled=${busy}
      act=${() => act("forget", gone)} />
  </div>
  ${stays && html`<p class="hint" id=${why}>${stays}</p>`}`;
}

// What is in use is never taken away: said where the buttons for it are.
function whyItStays(row) {
  if (row.state === "active") return "It is answering, so it stays where it is; it can sleep once this turn has ended.";
  if (row.state === "waking") return "It is waking, so it stays where it is.";
  if (row.state === "saving") return "It is being saved, and sleeps as soon as that is done.";
  return row.pinned && isHot(row) ? "It is pinned, so it does not sleep." : "";
}

// A first look: one short chat that goes cold and comes back, with what the server said of it.

import { html, signal } from "../parts/html.js";
import { Source } from "../parts/badges.js";
import { Copy } from "../parts/copy.js";
import { call, keyOf, send, sessionPath } from "../live/api.js";
import { server } from "../live/store.js";
import { seconds } from "../live/format.js";
import { KEY, linesFor, thisServer } from "./clients.js";

const ASK = "In one sentence: what is a thermocline in a lake?";
const THEN = "And why does a swimmer notice it?";
const ID = "try-it";
const TRY_AGAIN_MS = 250;
const MOST_TRIES = 40;
const NOTHING = { said: [], step: "start", trouble: "" };
const chatting = signal(NOTHING); // said: [{question, answer, source, reason, cached, took}]

export const isTrying = () => chatting.value.step !== "start" || chatting.value.trouble !== "";

// The session was forgotten elsewhere on the page: its talk is over.
export function forgotten(id) {
  if (id === ID) chatting.value = NOTHING;
}

const doing = (next, deed) => async () => {
  const { said, step } = chatting.value;
  chatting.value = { said, step: "busy", trouble: "" };
  try {
    await deed();
    chatting.value = { ...chatting.value, step: next };
  } catch (error) {
    chatting.value = { said, step, trouble: error.message };
  }
};

const ask = (question) => async () => {
  const { said, step } = chatting.value;
  const show = (turn) => (chatting.value = { said: [...said, turn], step, trouble: "" });
  await chat(server.value.model, said, question, show);
};

// Its packed copy is written after the turn: a click before that waits for it.
async function sleep() {
  for (let tries = 1; ; tries++) {
    try {
      const said = await call("POST", sessionPath({ id: ID }, "demote"));
      if (said?.state !== "saving" || tries === MOST_TRIES) return said;
    } catch (error) {
      if (error.status !== 409 || tries === MOST_TRIES) throw error;
    }
    await new Promise((done) => setTimeout(done, TRY_AGAIN_MS));
  }
}

export function OfferToTry() {
  return html`<p class="hint try-small">Want to see one go cold and come back? <button type="button" class="link" disabled=${!server.value?.model} onClick=${doing("asked", ask(ASK))}>Try it with a short chat</button></p>`;
}

export function TryIt({ open }) {
  const { said, step, trouble } = chatting.value;
  const model = server.value?.model;
  return html`<section class="card try" aria-labelledby="try">
    <h2 id="try">${said.length ? "A chat of your own" : "No conversations yet"}</h2>
    ${said.length === 0 &&
    html`<p>Point a client at this server (<a href="#setup">Set-up</a> has the lines), or try it here: one short chat, which then sleeps and comes back.</p>`}
    <ol class="talk" aria-live="polite">
      ${said.map(
        (x) => html`<li><p class="asked">${x.question}</p><p class="answered">${x.answer || "…"}</p>
          <p class="faint"><${Source} source=${x.source} reason=${x.reason} /> ${x.cached ? `· ${x.cached} tokens not computed again, ` : "· "}${x.first == null ? "no word yet" : `first word after ${seconds(x.first)}`}</p></li>`,
      )}
    </ol>
    ${trouble && html`<p class="bad" role="alert">${trouble}</p>`}
    <p class="actions">
      ${step === "start" && html`<button type="button" class="solid" disabled=${!model} onClick=${doing("asked", ask(ASK))}>Try it: send one short chat</button>`}
      ${step === "busy" && html`<span class="busy-words">One moment …</span>`}
      ${step === "asked" && html`<button type="button" class="solid" onClick=${doing("slept", sleep)}>Let it sleep</button><span class="faint">It is hot now. An idle session falls asleep by itself after a while.</span>`}
      ${step === "slept" && html`<button type="button" class="solid" onClick=${doing("back", ask(THEN))}>Come back to it</button><span class="faint">It sleeps, packed. Watch it come back from there.</span>`}
      ${said.length > 0 && html`<button type="button" onClick=${() => open({ id: ID, tenant: ownTenant() })}>Show this session</button>
        <button type="button" class="quiet" onClick=${() => (chatting.value = NOTHING)}>Put this away</button>`}
    </p>
    ${said.length === 0 && html`<${Copy} label="The same by curl" text=${linesFor("curl", thisServer())} secret=${keyOf()} instead=${KEY} />
      ${keyOf() && html`<p class="hint">Copied, the line has your key where it says ${KEY}.</p>`}`}
  </section>`;
}

const ownTenant = () => (server.value?.admin ? server.value.tenant : undefined);

async function chat(model, before, question, show) {
  const messages = before.flatMap((x) => [
    { role: "user", content: x.question },
    { role: "assistant", content: x.answer },
  ]);
  messages.push({ role: "user", content: question });
  const began = performance.now();
  const body = { model, messages, max_tokens: 32, temperature: 0, stream: true };
  const answer = await send("POST", "v1/chat/completions", body, { "x-session-id": ID });
  const cache = /^([a-z-]+)(?:; tokens=(\d+))?(?:; reason=([a-z-]+))?/.exec(answer.headers.get("x-thermocline-cache") ?? "");
  const turn = {
    question,
    answer: "",
    source: cache?.[1],
    cached: Number(cache?.[2] ?? 0),
    reason: cache?.[3],
    first: null, // seconds to the first word
  };
  for await (const words of wordsOf(answer.body)) {
    turn.first ??= (performance.now() - began) / 1000;
    turn.answer += words;
    show({ ...turn });
  }
  show({ ...turn });
}

async function* wordsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const words = event.choices?.[0]?.delta?.content;
      if (words) yield words;
    }
  }
}

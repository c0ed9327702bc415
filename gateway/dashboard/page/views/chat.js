// A chat with the served model that shows what each turn reused, and lets its session sleep and wake.

import { html, signal, useEffect, useRef } from "../parts/html.js";
import { Source, Whereabouts } from "../parts/badges.js";
import { Copy } from "../parts/copy.js";
import { call, keyOf, send, sessionPath } from "../live/api.js";
import { findKey, isHot, rowKey, rows, rowsVersion, server } from "../live/store.js";
import { count, seconds } from "../live/format.js";
import { KEY, useClients } from "./clients.js";

const FIRST_QUESTION = "In one sentence: what is a thermocline in a lake?";
const MOST_TOKENS = 512; // of an answer
const TRY_AGAIN_MS = 250;
const MOST_TRIES = 40;
const NEAR_PX = 40; // of the end, as a reader sees it

// turns: [{question, answer, source, reason, cached, wasHot, first}], ``first`` in seconds to the first word, ``wasHot``
// whether the session was hot before; if not, hot KV is that of another session
const fresh = () => ({ id: `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`, turns: [], busy: "", trouble: "" });
const talk = signal(fresh());
let answering = null; // AbortController of the answer that comes

const change = (part) => (talk.value = { ...talk.value, ...part });

// Begins another chat: its session was forgotten elsewhere on the page, or its reader has left.
export function startOver() {
  answering?.abort();
  talk.value = fresh();
}

export function forgotten(id) {
  if (id === talk.value.id) startOver();
}

// Returns whether the deed was done. What it changes is shown while its chat is the one on the page.
async function during(busy, deed) {
  const { id } = talk.value;
  const ofChat = (part) => id === talk.value.id && change(part);
  change({ busy, trouble: "" });
  try {
    await deed(ofChat);
    return true;
  } catch (error) {
    if (error.name !== "AbortError") ofChat({ trouble: error.message });
    return false;
  } finally {
    ofChat({ busy: "" });
  }
}

// Returns whether the question has an answer; a turn without a word of one is taken back.
async function ask(question) {
  const { id, turns } = talk.value;
  let answer = "";
  await during("answering", async (ofChat) => {
    answering = new AbortController();
    ofChat({ turns: [...turns, { question, answer, cached: 0, first: null }] });
    for await (const turn of answered(id, turns, question, answering.signal)) {
      ({ answer } = turn);
      ofChat({ turns: [...turns, turn] });
    }
    if (!answer) throw new Error(`There was no word of an answer within ${MOST_TOKENS} tokens.`);
  });
  if (!answer && id === talk.value.id) change({ turns });
  return answer !== "";
}

// A click before the packed copy is written waits for it.
const sleep = () =>
  during("falling asleep", async () => {
    const path = sessionPath({ id: talk.value.id }, "demote");
    for (let tries = 1; ; tries++) {
      try {
        const said = await call("POST", path);
        if (said?.state !== "saving" || tries === MOST_TRIES) return;
      } catch (error) {
        if (error.status !== 409 || tries === MOST_TRIES) throw error;
      }
      await new Promise((done) => setTimeout(done, TRY_AGAIN_MS));
    }
  });

const wake = () => during("waking", () => call("POST", sessionPath({ id: talk.value.id }, "prefetch")));

export function Chat({ open }) {
  rowsVersion.value;
  const { id, turns, busy, trouble } = talk.value;
  const row = rows.get(findKey(rowKey({ id })));
  const model = server.value?.model;
  const end = useRef(null);
  const list = useRef(null);
  const atEnd = useRef(true); // the reader has not scrolled back
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns.length]);
  useEffect(() => void (atEnd.current && (list.current.scrollTop = list.current.scrollHeight)), [turns]);
  const onScroll = ({ target: x }) => (atEnd.current = x.scrollHeight - x.scrollTop - x.clientHeight < NEAR_PX);
  return html`<section class="card chat" aria-labelledby="chat">
    <header><h2 id="chat">Chat with ${model ?? "the model"}</h2>
      ${row && html`<p class="tags"><${Whereabouts} row=${row} /> <span class="faint">${count(row.tokens)} tokens</span></p>`}</header>
    ${turns.length === 0 && html`<p class="hint">Each answer says what of its prompt was reused, and from where. Let the session sleep in between, and ask again. ${" "}
      <button type="button" class="link" disabled=${!model || busy} onClick=${() => ask(FIRST_QUESTION)}>${FIRST_QUESTION}</button></p>`}
    <ol class="talk" aria-live="polite" aria-busy=${!!busy} aria-label="Questions and answers" tabindex="0" ref=${list} onScroll=${onScroll}>${turns.map((x, i) => html`<${Turn} key=${i} turn=${x} />`)}</ol>
    ${trouble && html`<p class="bad" role="alert">${trouble}</p>`}
    <${Ask} disabled=${!model || !!busy} />
    <p class="actions" ref=${end}>
      ${busy && html`<span class="busy-words">${busy} …</span>`}
      ${busy === "answering" && html`<button type="button" onClick=${() => answering.abort()}>Stop</button>`}
      ${row && !busy && (isHot(row) ? html`<button type="button" onClick=${sleep}>Let it sleep</button>` : html`<button type="button" onClick=${wake}>Wake</button>`)}
      ${row && html`<button type="button" onClick=${() => open(row)}>Show this session</button>`}
      ${turns.length > 0 && !busy && html`<button type="button" class="quiet" onClick=${() => (talk.value = fresh())}>New chat</button>`}
    </p>
  </section>`;
}

function Turn({ turn: x }) {
  const others = x.source === "hot" && !x.wasHot ? " (another session begins the same)" : "";
  const reused = x.cached ? `${count(x.cached)} tokens not computed again, ` : "";
  return html`<li><p class="asked">${x.question}</p><p class="answered">${x.answer || "…"}</p>
    <p class="faint"><${Source} source=${x.source} reason=${x.reason} />${others} · ${reused}${x.first == null ? "no word yet" : `first word after ${seconds(x.first)}`}</p></li>`;
}

function Ask({ disabled }) {
  const field = useRef(null);
  const submit = async (event) => {
    event.preventDefault();
    const question = field.current.value.trim();
    if (!question || disabled) return;
    field.current.value = "";
    if (!(await ask(question)) && field.current) field.current.value ||= question;
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="ask-line" onSubmit=${submit}>
    <label class="sr" for="question">Message</label>
    <textarea id="question" rows="2" ref=${field} onKeyDown=${onKeyDown} placeholder="Message"></textarea>
    <button type="submit" class="solid" disabled=${disabled}>Send</button>
  </form>`;
}

// What the other views show while there is no conversation.
export function NoConversations() {
  const curl = useClients().find((x) => x.id === "curl");
  return html`<section class="card" aria-labelledby="none-yet">
    <h2 id="none-yet">No conversations yet</h2>
    <p>Point a client at this server (<a href="#setup">Set-up</a> has the lines), or <a href="#chat">chat here</a>: the session then sleeps and comes back while you look.</p>
    ${curl && html`<${Copy} label="The same by curl" text=${curl.text} secret=${keyOf()} instead=${KEY} />`}
    ${keyOf() && html`<p class="hint">Copied, the line has your key where it says ${KEY}.</p>`}
  </section>`;
}

// ---- one streamed turn

const CACHE = /^([a-z-]+)(?:; tokens=(\d+))?(?:; reason=([a-z-]+))?/;

// Yields the turn as it grows.
async function* answered(id, before, question, stopped) {
  const messages = before.flatMap((x) => [
    { role: "user", content: x.question },
    { role: "assistant", content: x.answer },
  ]);
  messages.push({ role: "user", content: question });
  const row = rows.get(findKey(rowKey({ id })));
  const wasHot = !!row && isHot(row);
  const began = performance.now();
  const body = { model: server.value.model, messages, max_tokens: MOST_TOKENS, temperature: 0, stream: true };
  const answer = await send("POST", "v1/chat/completions", body, { "x-session-id": id }, stopped);
  const [, source, cached, reason] = CACHE.exec(answer.headers.get("x-thermocline-cache") ?? "") ?? [];
  const turn = { question, answer: "", source, reason, cached: Number(cached ?? 0), wasHot, first: null };
  yield { ...turn };
  for await (const words of wordsOf(answer.body)) {
    turn.first ??= (performance.now() - began) / 1000;
    turn.answer += words;
    yield { ...turn };
  }
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

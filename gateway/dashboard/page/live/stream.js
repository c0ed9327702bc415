// Keeps the store up to date: one stream of events, resumed where it broke; else asking every 2 s.
//
// EventSource cannot send a key, so the stream is read by fetch. A hidden page closes it after a
// while and resumes it where it was: a page that is not seen costs nothing.

import * as store from "./store.js";
import { ApiError, call, ofModel, send } from "./api.js";

const PAGE = 250; // sessions in the first event of a stream, and in each that has more of them
const SILENT_MS = 45_000; // the server gives a sign of life more often
const ASK_AGAIN_MS = 2_000;
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 15_000;
const HIDDEN_MS = 60_000;

let running = null; // AbortController of the stream that is open, or being opened
let lastId = "";
let hiddenTimer = 0;

export function start() {
  stop();
  lastId = "";
  run((running = new AbortController()));
}

export function stop() {
  running?.abort();
  running = null;
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) hiddenTimer = setTimeout(stop, HIDDEN_MS);
  else if (!running && store.connection.value.phase !== "asking") run((running = new AbortController()));
});

async function run(mine) {
  let wait = FIRST_RETRY_MS;
  while (!mine.signal.aborted) {
    try {
      await follow(mine, () => (wait = FIRST_RETRY_MS));
      lost("The stream ended.");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) return askForKey(error);
      if (error instanceof ApiError && error.status === 404) return ask(mine);
      lost(error.message);
    }
    await pause(mine, wait * (0.75 + Math.random() / 2));
    wait = Math.min(MAX_RETRY_MS, wait * 2);
  }
}

function askForKey(error) {
  running = null;
  store.reset();
  store.connection.value = { phase: "asking", why: error.message };
}

function lost(why) {
  store.connection.value = { phase: "lost", why };
}

async function follow(mine, heard) {
  const resume = lastId ? { "last-event-id": lastId } : {};
  if (lastId) store.interrupted();
  const watch = new AbortController();
  mine.signal.addEventListener("abort", () => watch.abort(), { once: true });
  const answer = await send("GET", ofModel(`v1/events?rows=${PAGE}`), null, resume, watch.signal);
  store.takeClock(answer.headers.get("date"));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let timer = 0;
  let pieces = []; // of an event that is not whole yet: a snapshot may be megabytes
  for (;;) {
    clearTimeout(timer);
    timer = setTimeout(() => watch.abort(), SILENT_MS);
    const { done, value } = await reader.read();
    if (done) break;
    heard();
    const atBorder = value[0] === "\n" && pieces.at(-1)?.endsWith("\n");
    pieces.push(value);
    if (!atBorder && !value.includes("\n\n")) continue;
    const events = pieces.join("").split("\n\n");
    pieces = [events.pop()];
    for (const event of events) take(event);
  }
  clearTimeout(timer);
}

function take(event) {
  const fields = {};
  for (const line of event.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue; // a comment: a sign of life
    const name = line.slice(0, at);
    const value = line.slice(line[at + 1] === " " ? at + 2 : at + 1);
    fields[name] = name in fields ? `${fields[name]}\n${value}` : value;
  }
  if (fields.id) lastId = fields.id;
  if (!fields.data) return;
  if (fields.event === "snapshot") {
    lastId = fields.id ?? ""; // of one in several pages the last has it
    store.snapshot(JSON.parse(fields.data));
  } else if (fields.event === "more") store.more(JSON.parse(fields.data));
  else if (fields.event === "change") store.change(JSON.parse(fields.data));
  else return;
  if (store.connection.value.phase !== "live") store.connection.value = { phase: "live", why: "" };
}

// ---- a server without events

async function ask(mine) {
  const models = await call("GET", "v1/models").catch(() => ({ data: [] }));
  const about = { model: models.data[0]?.id ?? null, admin: false };
  while (!mine.signal.aborted) {
    try {
      const said = await call("GET", ofModel("v1/sessions"));
      const at = store.serverTime();
      const sessions = said.data.map((x) => ({ ...x, idle_since: x.idle_s ? at - x.idle_s : null }));
      store.snapshot({ server: about, sessions, num_sessions: sessions.length });
      store.connection.value = { phase: "polling", why: "This server has no stream of events." };
    } catch (error) {
      if (error.status === 401) return askForKey(error);
      lost(error.message);
    }
    await pause(mine, ASK_AGAIN_MS);
  }
}

function pause(mine, ms) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    mine.signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}

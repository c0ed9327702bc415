// All that the page knows, as signals: the last snapshot.

import { batch, computed, signal } from "../vendor/signals.js";

export const TIERS = ["hot", "ram", "disk", "redis"];
export const TIER_NAMES = {
  hot: "Hot",
  get ram() {
    return packed.value ? "Packed RAM" : "RAM";
  },
  disk: "Disk",
  redis: "Redis",
};
const LEAST_RATIO = 1.05;
const RECENT_S = 120; // of which the chart has every second

export const connection = signal({ phase: "connecting", why: "" });
export const server = signal(null);
export const now = signal(null);
export const memory = signal(null);
export const quality = signal(null);
// True once something that is stored takes less room than in bf16.
export const packed = computed(() => memory.value?.bf16_bytes > LEAST_RATIO * memory.value?.cold_bytes);
export const tenantRows = signal([]); // for administrators
export const numSessions = signal(0); // may be more than are listed
export const tick = signal(Date.now() / 1000); // the server's clock, once a second
export const rows = new Map();
export const rowsVersion = signal(0);
export const clients = new Map(); // how many sessions each client and each tenant has
export const tenants = new Map();
export const places = signal(emptyPlaces());
export const moves = signal([]); // sessions that went from one tier to another, newest first
export const points = signal(0); // grows with ``history``
export const history = { at: [], prompt: [], answer: [] };
let clockAhead = 0; // the server's clock less this one's

export const rowKey = (row) => `${row.tenant ?? ""}\u0000${row.id}`;
// What a reader knows a conversation by: its title, where it has one, and the end of its id.
export const nameOf = (row) => row.title || row.id;
export const endOf = (id) => (id.length > 8 ? `…${id.slice(-6)}` : id);
export function titleOf(tenant, id) {
  return nameOf(rows.get(rowKey({ tenant, id })) ?? { id });
}
export const idOf = (key) => key.slice(key.indexOf("\u0000") + 1);
// An address may name a session without its tenant, also for a reader who sees those of all.
export function findKey(key) {
  rowsVersion.value;
  if (!key || rows.has(key) || !key.startsWith("\u0000")) return key;
  for (const known of rows.keys()) if (idOf(known) === idOf(key)) return known;
  return key;
}
const HOT_STATES = new Set(["active", "idle", "saving", "hibernating"]);
export const isHot = (row) => HOT_STATES.has(row.state);
// Where a conversation's KV is now: one of TIERS, or "" if nowhere yet.
export const placeOf = (row) => (isHot(row) ? "hot" : (row.tier ?? ""));
export const serverTime = () => Date.now() / 1000 + clockAhead;

setInterval(() => {
  if (!document.hidden) tick.value = serverTime();
}, 1000);

export function snapshot(said) {
  batch(() => {
    tick.value = serverTime();
    server.value = said.server ?? null;
    memory.value = said.memory ?? null;
    quality.value = said.quality ?? null;
    now.value = said.now ?? null;
    tenantRows.value = said.tenants ?? [];
    numSessions.value = said.num_sessions ?? 0;
    moves.value = [...(said.moves ?? [])].reverse();
    note(said.hour, said.now ?? {});
    takeRows(said.sessions ?? []);
  });
}

export function reset() {
  recent.length = 0;
  snapshot({});
}

// A browser whose clock is wrong must not show wrong ages. ``date`` is the answer's header.
export function takeClock(date) {
  const off = Date.parse(date) / 1000 - Date.now() / 1000;
  clockAhead = Math.abs(off) > 3 ? off : 0;
  tick.value = serverTime();
}

// ---- speeds: the server's means of the last hour, and what was seen each second since

const recent = []; // [at, prompt, answer]

function note(hour, figures) {
  const at = Math.round(serverTime());
  if (recent.at(-1)?.[0] === at) recent.pop();
  recent.push([at, figures.prompt_tokens_per_s ?? null, figures.answer_tokens_per_s ?? null]);
  while (recent[0][0] < at - RECENT_S) recent.shift();
  const steps = (hour?.prompt_tokens_per_s ?? []).map((prompt, i) => [
    Math.round(hour.since + (i + 0.5) * hour.step_s),
    prompt,
    hour.answer_tokens_per_s[i],
  ]);
  const all = [...steps.filter(([then]) => then < recent[0][0]), ...recent];
  history.at = all.map((x) => x[0]);
  history.prompt = all.map((x) => x[1]);
  history.answer = all.map((x) => x[2]);
  points.value += 1;
}

// ---- sessions

const written = new Map(); // rows as they came, to keep those that are as they were

function takeRows(said) {
  const before = new Map(rows);
  const text = new Map(written);
  for (const known of [rows, written, clients, tenants]) known.clear();
  const counted = emptyPlaces();
  let same = said.length === before.size;
  for (const fresh of said) {
    const key = rowKey(fresh);
    const line = JSON.stringify(fresh);
    const row = text.get(key) === line ? before.get(key) : fresh;
    same &&= row !== fresh;
    rows.set(key, row);
    written.set(key, line);
    count(row, counted);
  }
  if (same) return;
  places.value = counted;
  rowsVersion.value += 1;
}

function emptyPlaces() {
  return Object.fromEntries(
    ["", ...TIERS].map((name) => [name, { sessions: 0, bytes: 0, saved: 0, pinned: 0 }]),
  );
}

function count(row, counted) {
  const sum = (counted[placeOf(row)] ??= { sessions: 0, bytes: 0, saved: 0, pinned: 0 });
  sum.sessions += 1;
  sum.bytes += row.bytes ?? 0;
  sum.saved += row.saved_s ?? 0;
  if (row.pinned) sum.pinned += 1;
  for (const [counts, name] of [
    [clients, row.client],
    [tenants, row.tenant],
  ])
    counts.set(name, (counts.get(name) ?? 0) + 1);
}

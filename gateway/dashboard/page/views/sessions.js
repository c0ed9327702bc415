// All conversations as a table: found by filters, in any order; one of them opened beside it.

import { computed, html, signal, useEffect, useRef } from "../parts/html.js";
import { Client, clientName, isFirst, Since, Source, Whereabouts } from "../parts/badges.js";
import { Rows } from "../parts/rows.js";
import { clients, endOf, idOf, nameOf, numSessions, placeOf, rowKey, rows, rowsVersion, tenants, TIER_NAMES } from "../live/store.js";
import { bytes, count, density, ratio, saved } from "../live/format.js";
import { Session } from "./session.js";
import { NoConversations } from "./chat.js";

export const NO_FILTER = { words: "", place: "", client: "", last: "", pinned: false, tasks: false };
export const filter = signal(NO_FILTER);
const sort = signal({ by: "idle", down: false });

const BY = {
  id: (x) => x.id,
  tenant: (x) => x.tenant ?? "",
  client: (x) => x.client ?? "",
  place: (x) => x.state,
  tokens: (x) => x.tokens,
  bytes: (x) => x.bytes,
  ratio: (x) => x.ratio ?? 0,
  idle: (x) => -(x.idle_since ?? Infinity),
  last: (x) => lastOf(x) ?? "",
  saved: (x) => x.saved_tokens ?? 0,
  turns: (x) => x.turns ?? 0,
};

// The list that is shown.
const found = computed(() => {
  rowsVersion.value;
  return [...rows.values()].filter(fitting(filter.value)).sort(comparing(sort.value));
});

function fitting({ words, place, client, last, pinned, tasks }) {
  const needle = words.trim().toLowerCase();
  return (row) =>
    (row.kind === "task") === tasks &&
    (!place || placeOf(row) === place) &&
    (!client || row.client === client) &&
    (!last || lastOf(row) === last) &&
    (!pinned || row.pinned) &&
    (!needle || matches(row, needle));
}

const lastOf = (row) => (isFirst(row.last_source, row.last_reason) ? "first" : row.last_source);

function comparing({ by, down }) {
  const key = BY[by];
  const sign = down ? -1 : 1;
  return (a, b) => {
    const x = key(a);
    const y = key(b);
    return x < y ? -sign : x > y ? sign : 0;
  };
}

const manyTenants = computed(() => (rowsVersion.value, tenants.size > 1));
const clientNames = computed(() => (rowsVersion.value, [...clients.keys()].filter(Boolean).sort()));

const matches = (row, needle) =>
  [row.id, row.title, row.parent, row.tenant, row.client].some((x) => x?.toLowerCase().includes(needle));

const COLUMNS = [
  { name: "id", label: "Session", cell: (x) => html`<${Marks} row=${x} />` },
  { name: "tenant", label: "Tenant", many: true, low: 2, cell: (x) => x.tenant },
  { name: "client", label: "Client", low: 3, cell: (x) => html`<${Client} name=${x.client} />` },
  { name: "place", label: "Where", cell: (x) => html`<${Whereabouts} row=${x} />` },
  { name: "idle", label: "Idle", cell: (x) => (x.idle_since ? html`<${Since} at=${x.idle_since} />` : "busy") },
  { name: "tokens", label: "Tokens", number: true, low: 1, cell: (x) => count(x.tokens) },
  { name: "bytes", label: "Bytes", number: true, low: 1, cell: (x) => bytes(x.bytes) },
  { name: "ratio", label: "vs bf16", number: true, low: 3, cell: (x) => html`<span title=${density(x.ratio)}>${ratio(x.ratio)}</span>` },
  { name: "last", label: "Last turn", low: 2, cell: (x) => html`<${Source} source=${x.last_source} reason=${x.last_reason} />` },
  { name: "turns", label: "Turns", number: true, low: 3, cell: (x) => count(x.turns) },
  { name: "saved", label: "Saved", number: true, low: 2, cell: (x) => html`<span class=${x.saved_tokens ? "" : "faint"}>${x.saved_s == null && x.saved_tokens ? `${count(x.saved_tokens)} tok` : saved(x.saved_s, 0)}</span>` },
];

const OF_ONE_TENANT = COLUMNS.filter((x) => !x.many);

function Marks({ row }) {
  return html`${row.title && html`<span class="end" title=${row.id}>${endOf(row.id)}</span>`}${row.pinned && html`<span class="pin" title="pinned">pinned</span>`}${(row.parent || row.kind === "child") &&
  html`<span class="child" title=${row.parent ? `started by ${row.parent}` : "serves another session"}>child</span>`}`;
}

export function Sessions({ chosen, open, close }) {
  const items = found.value;
  const row = chosen && rows.get(chosen);
  const columns = manyTenants.value ? COLUMNS : OF_ONE_TENANT;
  return html`<div class="split ${chosen ? "open" : ""}">
    <section class="card table-card" aria-labelledby="all-sessions">
      <h2 id="all-sessions" class="sr">Sessions</h2>
      <${Filters} shown=${items.length} />
      ${rows.size === 0
        ? html`<${NoConversations} />`
        : items.length === 0
          ? html`<p class="hint">No session is like that. <button type="button" class="link" onClick=${() => (filter.value = NO_FILTER)}>Show all</button></p>`
          : html`<${Rows} columns=${columns} items=${items} keyOf=${rowKey} nameOf=${nameOf} chosen=${chosen}
              choose=${open} sort=${sort.value} setSort=${(x) => (sort.value = x)} label="Table of sessions" />`}
    </section>
    ${chosen ? html`<${Side} key=${chosen} row=${row} chosen=${chosen} open=${open} close=${close} />` : ""}
  </div>`;
}

function Filters({ shown }) {
  const it = filter.value;
  const set = (name) => (event) =>
    (filter.value = { ...filter.value, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const listed = rows.size;
  const all = Math.max(numSessions.value, listed);
  return html`<form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
    <label class="grow"><span class="sr">Find by id, title, parent, client</span>
      <input type="search" placeholder="Find by id, title, client" value=${it.words} onInput=${set("words")} /></label>
    <${Choice} label="Where" value=${it.place} set=${set("place")} options=${TIER_NAMES} any="anywhere" />
    <${Choice} label="Client" value=${it.client} set=${set("client")} any="any client"
      options=${Object.fromEntries(clientNames.value.map((x) => [x, clientName(x)]))} />
    <${Choice} label="Last turn" value=${it.last} set=${set("last")} any="any last turn"
      options=${{ hot: "continued hot", "cold-ram": "from RAM", "cold-disk": "from disk", "cold-redis": "from Redis", miss: "missed", first: "first turn" }} />
    <label class="check"><input type="checkbox" checked=${it.pinned} onChange=${set("pinned")} /> pinned</label>
    <label class="check" title="titles, tags and the like, which programs ask for by themselves"><input type="checkbox" checked=${it.tasks} onChange=${set("tasks")} /> tasks</label>
    <output aria-live="polite">${shown === all ? count(all) : `${count(shown)} of ${count(all)}`}${listed < all ? ` (the ${count(listed)} last used are listed)` : ""}</output>
  </form>`;
}

function Choice({ label, value, set, options, any }) {
  return html`<label><span class="sr">${label}</span><select value=${value} onChange=${set}>
    <option value="">${any}</option>
    ${Object.entries(options).map(([name, words]) => html`<option value=${name} selected=${name === value}>${words}</option>`)}
  </select></label>`;
}

function Side({ row, chosen, open, close }) {
  const head = useRef(null);
  useEffect(() => head.current?.focus(), [chosen]);
  return html`<aside class="card side" aria-labelledby="opened" onKeyDown=${(event) => event.key === "Escape" && close()}>
    <header>
      <h2 id="opened" tabindex="-1" ref=${head}>${row ? nameOf(row) : idOf(chosen)}</h2>
      <button type="button" class="quiet" onClick=${close} aria-label="Close this session">✕</button>
    </header>
    ${row ? html`<${Session} row=${row} open=${open} close=${close} />` : html`<p class="hint">This session is gone: a new turn under its id starts it anew.</p>`}
  </aside>`;
}

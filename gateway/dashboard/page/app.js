// The page: its head, its tabs, and the view that the address names.

import { html, render, signal, useEffect, useRef, useState } from "./parts/html.js";
import { Said } from "./parts/said.js";
import { Strip } from "./parts/strip.js";
import { Tabs } from "./parts/tabs.js";
import { ThemeSwitch } from "./parts/theme.js";
import { call, keyOf, modelOf, setKey, setModel } from "./live/api.js";
import { connection, findKey, now, reset, rowKey, server } from "./live/store.js";
import { start } from "./live/poll.js";
import { Chat, startOver } from "./views/chat.js";
import { Memory } from "./views/memory.js";
import { Models } from "./views/models.js";
import { Now } from "./views/now.js";
import { Quality } from "./views/quality.js";
import { filter, NO_FILTER, Sessions } from "./views/sessions.js";
import { Setup } from "./views/setup.js";

const VIEWS = ["now", "sessions", "chat", "memory", "quality", "models", "setup"];
const LABELS = { now: "Now", sessions: "Sessions", chat: "Chat", memory: "Memory", quality: "Quality", models: "Models", setup: "Set-up" };
const PHASES = {
  connecting: "connecting",
  live: "live",
  lost: "not connected",
  asking: "needs a key",
};
const place = signal(read());

// "#sessions/TENANT/ID": the view, and the session that is open; an id may have slashes.
function read() {
  const [view, tenant, ...rest] = location.hash.slice(1).split("/").map(decoded);
  const id = rest.join("/");
  return { view: VIEWS.includes(view) ? view : "now", open: id ? rowKey({ tenant: tenant || undefined, id }) : "" };
}

// An address that was typed or cut may hold a % that begins no character: it stands for itself.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function go(view, row) {
  const opened = row ? `/${encodeURIComponent(row.tenant ?? "")}/${encodeURIComponent(row.id)}` : "";
  location.hash = `${view}${opened}`;
}

addEventListener("hashchange", () => (place.value = read()));

function App() {
  const { phase } = connection.value;
  const { view } = place.value;
  useEffect(() => void (document.title = `${LABELS[view]} · Thermocline`), [view]);
  if (phase === "asking") return html`<${Head} /><main><${AskForKey} /></main><${Said} />`;
  return html`
    <${Head} />
    <main>
      <${Trouble} />
      <${Strip} chosen=${view === "sessions" ? chosenCell() : ""} choose=${filterBy} />
      <${Tabs} label="Views" panel="view" chosen=${view} choose=${(name) => go(name)}
        tabs=${VIEWS.map((name) => ({ name, label: LABELS[name], badge: badgeOf(name) }))} />
      <div id="view" role="tabpanel" aria-labelledby=${`view-tab-${view}`} class="view ${view}"><${View} /></div>
    </main>
    <${Said} />
  `;
}

const open = (row) => go("sessions", row);

function View() {
  switch (place.value.view) {
    case "sessions":
      return html`<${Sessions} chosen=${findKey(place.value.open)} open=${open} close=${() => go("sessions")} />`;
    case "chat":
      return html`<${Chat} open=${open} />`;
    case "memory":
      return html`<${Memory} />`;
    case "quality":
      return html`<${Quality} />`;
    case "models":
      return html`<${Models} />`;
    case "setup":
      return html`<${Setup} />`;
    default:
      return html`<${Now} open=${open} />`;
  }
}

const badgeOf = (name) => (name === "now" ? now.value?.running || "" : "");
const chosenCell = () => (filter.value.last === "miss" ? "miss" : filter.value.place);

function filterBy(name) {
  filter.value = name === "miss" ? { ...NO_FILTER, last: "miss" } : { ...NO_FILTER, place: name };
  go("sessions");
}

function Head() {
  const it = server.value;
  const { phase, why } = connection.value;
  const icon = new URL("icon.svg", import.meta.url).href;
  return html`<header class="head">
    <h1><img src=${icon} alt="" width="26" height="26" /> Thermocline</h1>
    <p class="served"><${ModelPicker} /> ${it?.engine && html`<span class="faint">on ${it.engine}</span>`}</p>
    <p class="state ${phase}" title=${why} role="status"><i aria-hidden="true"></i>${PHASES[phase]}</p>
    ${keyOf() && html`<button type="button" class="quiet" onClick=${leave}>Sign out</button>`}
    <${ThemeSwitch} />
  </header>`;
}

// The name of the model; a choice where the server has several.
function ModelPicker() {
  const it = server.value;
  const [models, setModels] = useState([]);
  const state = it?.loading || it?.ready;
  useEffect(() => {
    call("GET", "v1/models").then(
      (said) => setModels(said.data.filter((x) => x.id === x.root)),
      () => setModels([]), // a page that cannot ask shows the one that it looks at
    );
  }, [it?.model, state]);
  if (models.length < 2) return it?.model ? html`<b>${it.model}</b>` : "";
  const choose = (event) => {
    setModel(event.target.value);
    reset();
    start();
  };
  return html`<select aria-label="Model" value=${modelOf() || models[0].id} onChange=${choose}>
    ${models.map((x) => html`<option key=${x.id} value=${x.id}>${x.id}${x.state === "loaded" ? "" : ` (${x.state})`}</option>`)}
  </select>`;
}

function leave() {
  setKey("");
  startOver();
  start();
}

function Trouble() {
  const it = server.value;
  const { phase, why } = connection.value;
  if (phase === "lost") return html`<p class="trouble" role="alert">${why} Trying again; what is shown may be old.</p>`;
  if (it?.draining) return html`<p class="trouble" role="alert">This server is shutting down: it takes no new turns.</p>`;
  if (it?.loading === "unloaded") return html`<p class="trouble calm">This model is not loaded. A request for it loads it; its sessions come back with it.</p>`;
  if (it && it.loading && it.loading !== "loaded") return html`<p class="trouble calm">This model is ${it.loading}.</p>`;
  if (it && it.ready === false) return html`<p class="trouble" role="alert">The engine is not ready: ${it.trouble || "it is starting"}.</p>`;
  if (it?.hibernation === false) return html`<p class="trouble calm">Sessions do not sleep here: ${it.hibernation_reason}.</p>`;
  return "";
}

function AskForKey() {
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const enter = (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (key !== keyOf()) startOver();
    setKey(key);
    connection.value = { phase: "connecting", why: "" };
    start();
  };
  return html`<form class="card ask" onSubmit=${enter}>
    <h2>This server needs a key</h2>
    ${keyOf() && html`<p class="bad" role="alert">${connection.value.why}</p>`}
    <label for="key">API key</label>
    <input id="key" type="password" ref=${field} autocomplete="off" spellcheck="false" required placeholder="tc-…" />
    <p class="hint">It stays in this tab and is sent to this server only. With a tenant's key you see that tenant's sessions; with an administrator's key, all of them.</p>
    <button type="submit" class="solid">Open</button>
  </form>`;
}

render(html`<${App} />`, document.getElementById("app"));

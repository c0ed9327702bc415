// How clients get here, what the server finds wrong with itself, and the end of its log.

import { html, signal, useEffect, useRef, useState } from "../parts/html.js";
import { Copy } from "../parts/copy.js";
import { Tabs } from "../parts/tabs.js";
import { call, keyOf } from "../live/api.js";
import { server } from "../live/store.js";
import { clock, count } from "../live/format.js";
import { KEY, useClients } from "./clients.js";
import { Keys } from "./keys.js";

const ASK_AGAIN_MS = 2_000;
const MAX_LINES = 400;
const client = signal("claude");

export function Setup() {
  const it = server.value ?? {};
  return html`
    <${Clients} />
    <section class="card" aria-labelledby="about">
      <h2 id="about">This server</h2>
      <dl class="facts">
        <dt>Model</dt><dd>${it.model ?? "not loaded yet"}</dd>
        <dt>Engine</dt><dd>${it.engine ? named(it.engine, it.engine_version ?? "") : it.trouble || "starting"}</dd>
        <dt>Context</dt><dd>${count(it.max_context)} tokens</dd>
        <dt>Sleep</dt><dd>${it.hibernation === false ? it.hibernation_reason : "sessions sleep and come back"}</dd>
        <dt>Dialects</dt><dd>${it.dialects?.join(", ") ?? "–"}</dd>
        <dt>Version</dt><dd>${it.version ?? "–"}</dd>
        <dt>You are</dt><dd>${it.admin ? "an administrator: all tenants" : (it.tenant ?? "–")}</dd>
      </dl>
    </section>
    ${it.admin && html`<${Findings} /><${Keys} /><${Log} />`}
  `;
}

function Clients() {
  const all = useClients();
  const it = all.find((x) => x.id === client.value);
  return html`<section class="card" aria-labelledby="clients">
    <h2 id="clients">Connect a client</h2>
    <${Tabs} label="Clients" panel="client-lines" chosen=${client.value} choose=${(x) => (client.value = x)}
      tabs=${all.map((x) => ({ name: x.id, label: x.name }))} />
    ${it && html`<div id="client-lines" role="tabpanel" aria-labelledby=${`client-lines-tab-${it.id}`}>
      <${Copy} label=${`Lines for ${it.name}`} text=${it.text} secret=${keyOf()} instead=${KEY} />
      ${it.notes.map((x) => html`<p class="hint" key=${x}>${x}</p>`)}
      <p class="hint">${keyOf() ? `Copied, the lines have your key where they say ${KEY}. ` : ""}<code>thermocline connect ${it.id}</code> shows the same; with <code>--write</code> it puts them into a client's own file, where it has one.</p>
    </div>`}
  </section>`;
}

function Findings() {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let here = true;
    call("GET", "admin/findings").then(
      (said) => here && setFound(said.data ?? said),
      () => here && setFound(undefined),
    );
    return () => (here = false);
  }, []);
  if (!found) return "";
  return html`<section class="card" aria-labelledby="findings">
    <h2 id="findings">Findings</h2>
    ${found.length === 0
      ? html`<p class="hint">Nothing is wrong.</p>`
      : html`<ul class="findings">${found.map((x) => html`<li class=${`is-${x.verdict}`}><b>${x.about}</b> <span class="verdict">${x.verdict}</span><p>${x.text}</p>${x.advice && html`<p class="faint">${x.advice}</p>`}</li>`)}</ul>`}
  </section>`;
}

function Log() {
  const [lines, setLines] = useState(null);
  const last = useRef(0);
  const [follow, setFollow] = useState(true);
  const end = useRef(null);
  useEffect(() => {
    let timer = 0;
    let here = true;
    const ask = async () => {
      try {
        const said = await call("GET", `admin/log?after=${last.current}`);
        if (!here) return;
        last.current = said.last;
        if (said.data.length || !last.current) setLines((old) => [...(old ?? []), ...said.data].slice(-MAX_LINES));
      } catch {
        return; // not here, or not for this key: the log is left out
      }
      if (here) timer = setTimeout(ask, ASK_AGAIN_MS);
    };
    if (follow) ask();
    return () => ((here = false), clearTimeout(timer));
  }, [follow]);
  useEffect(() => {
    if (follow && end.current) end.current.scrollTop = end.current.scrollHeight;
  }, [lines]);
  if (!lines?.length) return "";
  return html`<section class="card" aria-labelledby="log">
    <h2 id="log">Log</h2>
    <label class="check"><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} /> follow</label>
    <pre class="log" tabindex="0" ref=${end} aria-label="The last lines of the log">${lines.map((x) => html`<span key=${x.n} class=${x.level}>${clock(x.at)} ${x.level} ${x.name}: ${x.text}${"\n"}</span>`)}</pre>
  </section>`;
}

// Some engines say their own name with their version.
const named = (engine, version) => (version.startsWith(engine) ? version : `${engine} ${version}`.trim());

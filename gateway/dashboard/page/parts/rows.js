// A real table of which only the rows in sight exist: ten thousand cost as much as thirty.
//
// One stop for the Tab key; arrows, Page, Home and End walk through all rows, in sight or not.

import { html, once, useEffect, useLayoutEffect, useRef, useState } from "./html.js";

const ROW = 36; // pixels; the style sheet's --row
const AROUND = 6; // rows beyond what is in sight

// columns: [{name, label, cell, number, low}]; ``low``: left out first where there is little room.
export function Rows({ columns, items, keyOf, chosen, choose, nameOf, sort, setSort, label }) {
  const box = useRef(null);
  const [view, setView] = useState({ first: 0, many: 40 });
  const [cursor, setCursor] = useState(0);
  const focusing = useRef(false);
  const look = () => {
    if (!box.current) return; // the window may change once more after the table
    const { scrollTop, clientHeight } = box.current;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - AROUND);
    const many = Math.ceil(clientHeight / ROW) + 2 * AROUND;
    if (first !== view.first || many !== view.many) setView({ first, many });
  };
  useLayoutEffect(look, [items.length]);
  useEffect(() => {
    addEventListener("resize", look);
    return () => removeEventListener("resize", look);
  });
  useEffect(() => {
    if (!focusing.current) return;
    focusing.current = false;
    box.current.querySelector(`[data-at="${cursor}"]`)?.focus();
  }, [cursor, view]);
  const page = Math.max(1, view.many - 2 * AROUND - 3);
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
  const onKeyDown = (event) => {
    if (!("at" in event.target.dataset)) return;
    let to = cursor + (steps[event.key] ?? 0);
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = items.length - 1;
    to = Math.min(items.length - 1, Math.max(0, to));
    if (to === cursor) return;
    event.preventDefault();
    focusing.current = true;
    setCursor(to);
    const top = to * ROW;
    const { scrollTop, clientHeight } = box.current;
    if (top < scrollTop) box.current.scrollTop = top;
    else if (top > scrollTop + clientHeight - 2.5 * ROW) box.current.scrollTop = top - clientHeight + 2.5 * ROW;
    look();
  };
  const shown = items.slice(view.first, view.first + view.many);
  const stop = Math.min(cursor, Math.max(0, items.length - 1));
  const reachable = stop >= view.first && stop < view.first + view.many ? stop : view.first;
  return html`<div class="rows" ref=${box} onScroll=${look} onKeyDown=${onKeyDown} role="region" aria-label=${label} tabindex=${items.length ? -1 : 0}>
    <table aria-rowcount=${items.length + 1}>
      <thead>
        <tr aria-rowindex="1">
          ${columns.map((x) => html`<${Head} key=${x.name} column=${x} sort=${sort} setSort=${setSort} />`)}
        </tr>
      </thead>
      <tbody>
        <${Gap} rows=${view.first} />
        ${shown.map((item, i) => {
          const at = view.first + i;
          const key = keyOf(item);
          return html`<${Row} key=${key} item=${item} at=${at} columns=${columns} name=${nameOf(item)}
            chosen=${key === chosen} reachable=${at === reachable} setCursor=${setCursor} choose=${choose} />`;
        })}
        <${Gap} rows=${items.length - view.first - shown.length} />
      </tbody>
    </table>
  </div>`;
}

const Row = once(({ item, at, columns, name, chosen, reachable, setCursor, choose }) => {
  const open = () => (setCursor(at), choose(item));
  const [head] = columns;
  return html`<tr aria-rowindex=${at + 2} class=${chosen ? "chosen" : ""} onClick=${open}>
    <th scope="row" class=${classOf(head)}>
      <button type="button" data-at=${at} tabindex=${reachable ? 0 : -1} aria-current=${chosen ? "true" : undefined}
        onFocus=${() => setCursor(at)}>${name}</button>
      ${head.cell(item)}
    </th>
    <${Cells} item=${item} columns=${columns} />
  </tr>`;
});

// Apart from the row: where rows only move, as they do every second, no cell is drawn again.
const Cells = once(({ item, columns }) => columns.slice(1).map((x) => html`<td key=${x.name} class=${classOf(x)}>${x.cell(item)}</td>`));

const classOf = (column) => `is-${column.name} ${column.number ? "number" : ""} ${column.low ? `low${column.low}` : ""}`;

function Head({ column, sort, setSort }) {
  const mine = sort.by === column.name;
  const order = mine ? (sort.down ? "descending" : "ascending") : "none";
  const turn = () => setSort({ by: column.name, down: mine ? !sort.down : !!column.number });
  return html`<th scope="col" class=${classOf(column)} aria-sort=${order}>
    <button type="button" onClick=${turn}
      >${column.label}<span aria-hidden="true" class="order">${mine ? (sort.down ? "▾" : "▴") : ""}</span></button>
  </th>`;
}

// One cell: it would keep the room of columns that are left out, if it spanned them.
function Gap({ rows }) {
  if (rows <= 0) return null;
  return html`<tr class="gap" aria-hidden="true"><td style=${{ height: `${rows * ROW}px` }}></td></tr>`;
}

// A line chart over time, by uPlot; its colours are the style sheet's, its last values are in words.

import { html, useEffect, useRef } from "./html.js";
import uPlot from "../vendor/uplot.js";
import { history, points } from "../live/store.js";
import { clock } from "../live/format.js";
import { theme } from "./theme.js";

const HEIGHT = 216;
const LEAST_S = 60; // shown
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800];

// lines: [{name, of, tone, show}], ``of`` names a line of the history, ``tone`` a custom property.
export function Chart({ lines, label }) {
  const place = useRef(null);
  const plot = useRef(null);
  const shades = theme.value; // a change of it makes the chart anew
  useEffect(() => {
    const box = place.current;
    const it = make(box, lines);
    plot.current = it;
    let frame = 0; // not within the observer: what it changes there is reported as a loop
    const fit = () => it.setSize({ width: box.clientWidth, height: HEIGHT });
    const resized = new ResizeObserver(() => (frame = requestAnimationFrame(fit)));
    resized.observe(box);
    return () => (resized.disconnect(), cancelAnimationFrame(frame), it.destroy());
  }, [shades]);
  const version = points.value;
  useEffect(() => plot.current?.setData(dataOf(lines)), [version, shades]);
  return html`<figure class="chart">
    <figcaption>
      ${lines.map((x) => html`<span class="key"><i class=${x.tone}></i>${x.name} <b>${x.show(history[x.of].at(-1))}</b></span>`)}
    </figcaption>
    <div ref=${place} role="img" aria-label=${label}></div>
  </figure>`;
}

const dataOf = (lines) => [history.at, ...lines.map((x) => history[x.of])];

function make(place, lines) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => resolved(place, style.getPropertyValue(`--${name}`));
  const grid = { stroke: colour("line"), width: 1 };
  const axis = { stroke: colour("muted"), grid, ticks: { show: false }, font: "11px system-ui" };
  return new uPlot(
    {
      width: place.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      padding: [8, 28, 0, 0],
      scales: {
        x: { range: (_, low, high) => [Math.max(Math.min(low, high - LEAST_S), high - 3600), high] },
        y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] },
      },
      axes: [
        { ...axis, space: 70, size: 28, incrs: STEPS_S, values: (_, all, at, space, step) => all.map((x) => clock(x).slice(0, step < 60 ? 8 : 5)) },
        { ...axis, size: 44, space: 36, values: (_, all, at, space, step) => all.map((x) => amount(x, step)) },
      ],
      series: [
        {},
        ...lines.map((x) => ({
          label: x.name,
          stroke: colour(x.tone),
          width: 1.75,
          points: { show: false },
        })),
      ],
    },
    dataOf(lines),
    place,
  );
}

// Labels differ wherever their places do: one more digit than the step between them has.
function amount(x, step) {
  if (step >= 100) return x ? `${Number((x / 1000).toFixed(2))}k` : "0";
  return `${Number(x.toFixed(3))}`;
}

// light-dark() is a word of style sheets only: let the browser work out what it means here.
function resolved(place, value) {
  const probe = place.appendChild(document.createElement("i"));
  probe.style.color = value;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

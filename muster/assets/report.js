"use strict";
// Draws the timelines from the JSON beside it. Text enters the page as text nodes only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const COLORS = {
    queue: "#d0d4d9", prefill: "#56b4e9", decode: "#0072b2", box_start: "#f0e442", tool: "#e69f00",
    verify: "#cc79a7", hold: "#8c8c8c", unrecorded: "#b7e4c7",
  };
  const BAND = "#e4dcf3", BAND_EDGE = "#8e75c2";  // no color of a state
  const LABELS = { box_start: "box start", unrecorded: "under way, not recorded yet" };
  const HIGH = 14, LEFT = 210, TOP = 34;
  let zoom = 1;

  function html(name, text, parent) {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function svg(name, attributes, parent) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
    if (parent) parent.append(made);
    return made;
  }

  function seconds(value) {
    if (value >= 120) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
    return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  }

  function clock(unix) {
    return new Date(unix * 1000).toISOString().slice(11, 19) + " UTC";
  }

  const root = document.getElementById("timeline");
  root.replaceChildren();
  const tip = html("div", "", document.body);
  tip.id = "tip";

  function pointed(node, words) {
    node.addEventListener("mousemove", (event) => {
      tip.textContent = words;
      tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - 320)}px`;
      tip.style.top = `${event.clientY + 14}px`;
    });
    node.addEventListener("mouseleave", () => { tip.textContent = ""; });
  }

  const controls = html("div", "", root);
  controls.className = "controls";
  const choice = html("select", "", controls);
  choice.id = "choice";
  choice.setAttribute("aria-label", "Timeline");
  data.timelines.forEach((one, at) => {
    const option = html("option", one.title, choice);
    option.value = String(at);
  });
  for (const [label, factor] of [["wider", 1.6], ["narrower", 1 / 1.6]]) {
    html("button", label, controls).addEventListener("click", () => {
      zoom = Math.min(64, Math.max(1, zoom * factor));
      draw();
    });
  }
  const note = html("span", "", controls);
  note.className = "dim";
  const legend = html("div", "", root);
  legend.className = "legend";
  for (const [state, color] of Object.entries(COLORS)) {
    const item = html("span", "", legend);
    const swatch = svg("svg", { width: 12, height: 12 }, item);
    svg("rect", { width: 12, height: 12, fill: color }, swatch);
    item.append(LABELS[state] || state);
  }
  const shaded = html("span", "", legend);
  svg("rect", { width: 12, height: 12, fill: BAND, stroke: BAND_EDGE },
    svg("svg", { width: 12, height: 12 }, shaded));
  shaded.append("a version is published");
  for (const words of ["◆ repaired", "▲ box rebuilt by replay", "bold: blocks the batch"]) {
    html("span", words, legend);
  }
  const chart = html("div", "", root);
  chart.className = "chart";
  const details = html("div", "Choose a lane to see what its sibling did.", root);
  details.id = "details";
  details.setAttribute("aria-live", "polite");

  function axis(picture, scale, one, height, width) {
    const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]
      .find((s) => s * scale >= 70) || 86400;
    for (let n = 0; n * step <= one.span_s; n += 1) {
      const x = LEFT + n * step * scale;
      svg("line", { class: "edge", x1: x, x2: x, y1: TOP - 6, y2: height }, picture);
      const last = x + 44 > width;  // no room to its right
      svg("text", { class: "dim", x: last ? x - 2 : x + 2, y: TOP - 10, "text-anchor": last ? "end" : "start" }, picture)
        .textContent = seconds(n * step);
    }
  }

  function lane(picture, strip, y, scale, width) {
    const name = `${strip.group}.${strip.sibling}`;
    const group = svg("g", { class: "lane", tabindex: 0, role: "button" }, picture);
    group.setAttribute("aria-label", `${name} ${strip.task} ${strip.ended || "open"}`);
    svg("rect", { class: "back", x: 0, y, width, height: HIGH }, group);
    const label = svg("text", { x: 6, y: y + HIGH - 3 }, group);
    label.textContent = name.length > 32 ? `…${name.slice(-31)}` : name;
    if (strip.blocking) label.setAttribute("class", "blocking");
    let last = 0;
    for (const [state, from, to] of strip.stretches) {
      const piece = svg("rect", {
        class: "piece", x: LEFT + from * scale, y: y + 2, width: Math.max(0.4, (to - from) * scale),
        height: HIGH - 4, fill: COLORS[state] || "#000",
      }, group);
      pointed(piece, `${name} · ${LABELS[state] || state} · ${seconds(to - from)} from ${seconds(from)}`);
      last = Math.max(last, to);
    }
    if (strip.blocking && last > 0) {
      const first = strip.stretches[0][1];
      const frame = { x: LEFT + first * scale, y: y + 1, width: (last - first) * scale, height: HIGH - 2 };
      svg("rect", { class: "box", ...frame }, group);
    }
    for (const mark of strip.marks) {
      const sign = svg("text", { class: mark.kind, x: LEFT + mark.at_s * scale - 4, y: y + HIGH - 3 }, group);
      sign.textContent = mark.kind === "repair" ? "◆" : "▲";
      pointed(sign, mark.text);
    }
    const show = () => {
      for (const other of chart.querySelectorAll(".chosen")) other.classList.remove("chosen");
      group.classList.add("chosen");
      const state = strip.ended || "has not ended";
      const lines = [`${name}   task ${strip.task}   ${state}${strip.blocking ? "   blocks the batch" : ""}`];
      details.textContent = lines.concat(strip.marks.map((m) => m.text), strip.details).join("\n");
    };
    group.addEventListener("click", show);
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(); }
    });
  }

  function draw() {
    const one = data.timelines[Number(choice.value)];
    chart.replaceChildren();
    tip.textContent = "";
    const room = Math.max(400, root.clientWidth - LEFT - 30);
    const scale = (room * zoom) / Math.max(one.span_s, 1e-3);
    const width = LEFT + room * zoom + 10;
    const groups = new Set(one.strips.map((s) => s.group)).size;
    const height = TOP + one.strips.length * HIGH + groups * 4 + 4;
    const picture = svg("svg", { width, height, role: "img" }, chart);
    for (const band of one.bands) {
      const shade = svg("rect", {
        class: "band", x: LEFT + band.start_s * scale, y: TOP, fill: BAND, "fill-opacity": 0.6,
        width: Math.max(1, (band.end_s - band.start_s) * scale), height: height - TOP,
        stroke: BAND_EDGE, "stroke-opacity": 0.6,
      }, picture);
      pointed(shade, band.text);
      const room = (band.end_s - band.start_s) * scale;
      if (room > 90) {
        const at = { class: "dim", x: LEFT + band.start_s * scale + 4, y: height - 6 };
        svg("text", at, picture).textContent = room > 330 ? band.text : "publication";
      }
    }
    axis(picture, scale, one, height, width);
    let y = TOP, group = null;
    for (const strip of one.strips) {
      if (group !== null && strip.group !== group) {
        svg("line", { class: "edge", x1: 0, x2: width, y1: y + 2, y2: y + 2 }, picture);
        y += 4;
      }
      group = strip.group;
      lane(picture, strip, y, scale, width);
      y += HIGH;
    }
    for (const [name, at] of one.lines) {
      const x = LEFT + at * scale;
      svg("line", { class: "moment", x1: x, x2: x, y1: 12, y2: height }, picture);
      const near = x > width - 80;
      svg("text", { class: "dim", x: near ? x - 4 : x + 3, y: 12, "text-anchor": near ? "end" : "start" }, picture)
        .textContent = name;
    }
    const left = one.lanes_total - one.strips.length;
    const rest = left ? `; ${left} more lanes, which ended earlier, are not shown` : "";
    note.textContent = `${one.strips.length} siblings from ${clock(one.start_unix_s)}, ${seconds(one.span_s)}${rest}`;
  }

  if (!data.timelines.length) {
    root.replaceChildren();
    html("p", "No group has been opened yet.", root);
    return;
  }
  choice.addEventListener("change", () => { zoom = 1; draw(); });
  window.addEventListener("resize", draw);
  draw();
})();

// Drawing: elements, scales, axes, markers, and the box that tells what is under the pointer.
// Text from files only ever becomes textContent or an attribute value, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// -- numbers --

// What is next to nothing is not shown as nothing.
const percent = (value) =>
  0 < value && value < 5e-5 ? (100 * value).toPrecision(1) : (100 * value).toFixed(2);
const short = (value) => String(Number(value.toPrecision(4)));
const present = (value) => value !== null && value !== undefined;

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

// Not Math.min(...values): an engine takes only so many arguments.
const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function extent(values, share = 0.06) {
  const low = lowest(values);
  const high = highest(values);
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}

// -- markers --

function corners(points, r) {
  return `M${points.map(([x, y]) => `${(x * r).toFixed(2)},${(y * r).toFixed(2)}`).join("L")}Z`;
}

function regular(count, r) {
  const turn = (i) => (2 * Math.PI * i) / count;
  return corners(Array.from({ length: count }, (_, i) => [1.15 * Math.sin(turn(i)), -1.15 * Math.cos(turn(i))]), r);
}

const CROSS = [[-1, -0.4], [-0.4, -0.4], [-0.4, -1], [0.4, -1], [0.4, -0.4], [1, -0.4], [1, 0.4],
  [0.4, 0.4], [0.4, 1], [-0.4, 1], [-0.4, 0.4], [-1, 0.4]];
const TURN = Math.SQRT1_2;
const SHAPES = {
  o: (r) => `M${-r},0A${r},${r} 0 1 1 ${r},0A${r},${r} 0 1 1 ${-r},0Z`,
  s: (r) => corners([[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], r),
  "^": (r) => corners([[0, -1.15], [1.1, 0.85], [-1.1, 0.85]], r),
  "<": (r) => corners([[-1.15, 0], [0.85, 1.1], [0.85, -1.1]], r),
  ">": (r) => corners([[1.15, 0], [-0.85, 1.1], [-0.85, -1.1]], r),
  v: (r) => corners([[0, 1.15], [1.1, -0.85], [-1.1, -0.85]], r),
  D: (r) => corners([[0, -1.25], [1.1, 0], [0, 1.25], [-1.1, 0]], r),
  X: (r) => corners(CROSS.map(([x, y]) => [(x - y) * TURN * 1.2, (x + y) * TURN * 1.2]), r),
  P: (r) => corners(CROSS.map(([x, y]) => [1.15 * x, 1.15 * y]), r),
  p: (r) => regular(5, r),
  h: (r) => regular(6, r),
};

function marker(style, x, y, r) {
  return draw("path", {
    class: style.hollow ? "marker hollow" : "marker",
    d: SHAPES[style.marker](r),
    transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
  });
}

const dashes = (style) => (style.dashes.length ? style.dashes.map((d) => d * 1.5).join(" ") : null);

// -- a plot's frame --

// Axes and grid for the host's width. x and y are [low, high]; the result has scales X and Y.
function frame(host, spec) {
  const width = Math.max(host.clientWidth, 240);
  const height = Math.round(spec.height ?? Math.min(Math.max(width * 0.62, 250), 360));
  const box = { left: 46, right: 14, top: spec.yName ? 26 : 10, bottom: 44 };
  const bend = spec.root ? Math.sqrt : (value) => value;
  const span = (range, from, to, by) => (value) =>
    from + ((by(value) - by(range[0])) / (by(range[1]) - by(range[0]))) * (to - from);
  const X = span(spec.x, box.left, width - box.right, (value) => value);
  const Y = span(spec.y, height - box.bottom, box.top, bend);
  const svg = draw("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: spec.role, "aria-label": spec.label,
    tabindex: spec.role === "img" ? 0 : null,
  });
  const rows = spec.yTicks ?? ticks(...spec.y, Math.max(3, Math.round(height / 60)));
  for (const value of rows) {
    const y = Y(value);
    svg.append(draw("line", { class: "rule", x1: box.left, x2: width - box.right, y1: y, y2: y }));
    svg.append(draw("text", { x: box.left - 8, y: y + 4, "text-anchor": "end", text: (spec.yText ?? short)(value) }));
  }
  const columns = spec.xTicks ?? ticks(...spec.x, Math.max(3, Math.round(width / 90)))
    .filter((at) => !spec.whole || Number.isInteger(at)).map((at) => [at, short(at)]);
  const base = height - box.bottom;
  for (const [at, name] of columns) {
    const x = X(at);
    if (!spec.categories) svg.append(draw("line", { class: "axis", x1: x, x2: x, y1: base, y2: base + 5 }));
    const slanted = spec.slanted
      ? { "text-anchor": "end", transform: `rotate(-35 ${x} ${base + 14})` }
      : { "text-anchor": "middle" };
    svg.append(draw("text", { x, y: base + 18, text: name, ...slanted }));
  }
  svg.append(draw("line", { class: "axis", x1: box.left, x2: width - box.right, y1: base, y2: base }));
  svg.append(draw("text", { class: "title", x: 0, y: 12, text: spec.yName }));
  if (!spec.slanted) {
    svg.append(draw("text", {
      class: "title", x: width - box.right, y: height - 4, "text-anchor": "end", text: spec.xName,
    }));
  }
  host.replaceChildren(svg);
  return { svg, X, Y, width, height, box, base };
}

// -- what is under the pointer --

const MOST_ROWS = 14;

// all: [style or null, name, value] each; shown at a place of the window.
function tell(head, all, x, y) {
  const tip = byId("tip");
  const rows = all.slice(0, MOST_ROWS);
  if (all.length > MOST_ROWS) rows.push([null, `and ${all.length - MOST_ROWS} more`, ""]);
  tip.replaceChildren(make("div", { class: "head", text: head }));
  for (const [style, name, value] of rows) {
    const words = make("span");
    if (style) words.append(make("i", { class: `swatch ${style.colour}` }));
    words.append(make("span", { text: name }));
    tip.append(make("div", { class: "row" }, words, make("b", { text: value })));
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const beside = x + 16 + width > window.innerWidth - 8 ? x - width - 16 : x + 16;
  tip.style.left = `${Math.max(8, Math.min(beside, window.innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(y - height / 2, window.innerHeight - height - 8))}px`;
}

function hush() {
  byId("tip").hidden = true;
}

// A vertical line that follows the pointer, or the arrow keys, from place to place.
// places: pixel positions; read(i) gives [head, rows].
function follow(plot, places, read) {
  const { svg, box, base } = plot;
  const line = draw("line", { class: "cross", y1: box.top, y2: base, visibility: "hidden" });
  svg.append(line);
  let at = -1;
  const go = (next, speak) => {
    at = next;
    const area = svg.getBoundingClientRect();
    line.setAttribute("x1", places[at]);
    line.setAttribute("x2", places[at]);
    line.setAttribute("visibility", "visible");
    const [head, rows] = read(at);
    tell(head, rows, area.left + places[at], area.top + box.top + (base - box.top) / 2);
    if (speak) byId("spoken").textContent = [head, ...rows.map(([, name, value]) => `${name}: ${value}`)].join("; ");
  };
  const leave = () => {
    line.setAttribute("visibility", "hidden");
    hush();
  };
  svg.addEventListener("pointermove", (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    let nearest = 0;
    places.forEach((place, i) => {
      if (Math.abs(place - x) < Math.abs(places[nearest] - x)) nearest = i;
    });
    go(nearest, false);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const last = places.length - 1;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last, Enter: Math.max(at, 0) }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined) return;
    event.preventDefault();
    go(next, true);
  });
}

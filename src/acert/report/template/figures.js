// The figures of the page. Each draws the groups it is given and returns the data it drew,
// {head, rows}, for the table beside it.

const BARE = "Every method is hidden, or none has this κ.";

const lineOf = (plot, xs, ys) =>
  xs.map((x, i) => `${i ? "L" : "M"}${plot.X(x).toFixed(1)},${plot.Y(ys[i]).toFixed(1)}`).join("");

// Along `low` and back along `high`.
const areaOf = (plot, xs, low, high) =>
  `${lineOf(plot, [...xs, ...xs.toReversed()], [...low, ...high.toReversed()])}Z`;

// -- accuracy against ACR --

function tradeOff(host, groups) {
  const points = groups.map((group) => ({
    group,
    x: 100 * group.acr[0], y: 100 * group.accuracy[0],
    dx: 100 * (group.acr[1] ?? 0), dy: 100 * (group.accuracy[1] ?? 0),
    runs: DATA.runs.filter((run) => DATA.groups[run.group] === group && run.certified),
  }));
  const clip = ([low, high]) => [Math.max(low, 0), Math.min(high, 100)];
  const across = points.flatMap((p) => [p.x - p.dx, p.x + p.dx, ...p.runs.map((run) => 100 * run.acr)]);
  const up = points.flatMap((p) => [p.y - p.dy, p.y + p.dy, ...p.runs.map((run) => 100 * run.accuracy)]);
  const x = clip(extent(across, 0.08));
  const y = clip(extent(up, 0.1));
  const plot = frame(host, {
    x, y, role: "group", xName: "ACR (%)", yName: "Accuracy (%)",
    height: Math.min(Math.max(host.clientWidth * 0.62, 300), 470),
    label: `Accuracy against ACR of ${points.length} settings. Arrow keys go from point to point.`,
  });
  contours(plot, x, y, points);
  for (const series of Map.groupBy(points, (p) => p.group.series).values()) {
    const front = series.filter((p) => p.group.front).sort((a, b) => a.x - b.x);
    const style = series[0].group.style;
    plot.svg.append(draw("path", {
      class: `curve ${style.colour}`, "stroke-dasharray": dashes(style),
      d: lineOf(plot, front.map((p) => p.x), front.map((p) => p.y)),
    }));
  }
  for (const p of points) {
    for (const run of p.runs.length > 1 ? p.runs : []) {
      plot.svg.append(dot(plot, p.group, run));
    }
  }
  const nodes = points.map((p, i) => point(plot, p, i === 0));
  plot.svg.append(...nodes);
  plot.svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = nodes.indexOf(document.activeElement);
    if (event.key === "Escape") hush();
    if (step === undefined || at < 0) return;
    event.preventDefault();
    const next = (at + step + nodes.length) % nodes.length;
    nodes[at].setAttribute("tabindex", -1);
    nodes[next].setAttribute("tabindex", 0);
    nodes[next].focus();
  });
  kappaLabels(plot, points);
  return {
    head: ["Setting", "n", "Acc", "± std", "ACR", "± std", "ART", "± std"],
    rows: groups.map((group) => [group.label, group.n, ...[group.accuracy, group.acr, group.art].flatMap(
      ([mean, std]) => [percent(mean), present(std) ? percent(std) : "–"])]),
  };
}

// A single run; the circle around it is easier to hit.
function dot(plot, group, run) {
  const at = { cx: plot.X(100 * run.acr), cy: plot.Y(100 * run.accuracy) };
  const node = draw("g", { class: group.style.colour },
    draw("circle", { class: "dot", r: 2.5, ...at }), draw("circle", { class: "around", r: 7, ...at }));
  node.addEventListener("pointerenter", () => {
    const area = plot.svg.getBoundingClientRect();
    tell(run.name, [["Setting", group.label], ["Seed", run.seed], ["Acc", percent(run.accuracy)], ["ACR", percent(run.acr)],
      ["ART", percent(run.art)]].map(([name, value]) => [null, name, value]), area.left + at.cx, area.top + at.cy);
  });
  node.addEventListener("pointerleave", hush);
  return node;
}

function point(plot, p, first) {
  const { group } = p;
  const [x, y] = [plot.X(p.x), plot.Y(p.y)];
  const figures = [["Acc", group.accuracy], ["ACR", group.acr], ["ART", group.art]].map(
    ([name, [mean, std]]) => [name, percent(mean) + (present(std) ? ` ± ${percent(std)}` : "")]);
  const runs = p.runs.map((run) => run.name);
  const node = draw("g", {
    class: `point ${group.style.colour}`, role: "img", tabindex: first ? 0 : -1,
    "aria-label": [group.label, ...figures.map((pair) => pair.join(" ")), `runs: ${runs.join(", ")}`].join("; "),
  });
  if (p.dx) node.append(draw("line", { class: "bar-line", x1: plot.X(p.x - p.dx), x2: plot.X(p.x + p.dx), y1: y, y2: y }));
  if (p.dy) node.append(draw("line", { class: "bar-line", x1: x, x2: x, y1: plot.Y(p.y - p.dy), y2: plot.Y(p.y + p.dy) }));
  node.append(marker(group.style, x, y, 5.5), draw("circle", { class: "ring", cx: x, cy: y, r: 11 }));
  const show = () => {
    const area = plot.svg.getBoundingClientRect();
    const listed = runs.length > 6 ? [...runs.slice(0, 6), `and ${runs.length - 6} more`] : runs;
    tell(group.label, [...figures.map(([name, value]) => [null, name, value]),
      ...listed.map((name, i) => [null, i ? "" : "Runs", name])], area.left + x, area.top + y);
  };
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", hush);
  node.addEventListener("blur", hush);
  return node;
}

// Equal ART: accuracy = ART² / ACR (Eq. 13).
function contours(plot, [left, right], [bottom, top], points) {
  const [least, most] = [Math.sqrt(left * bottom), Math.sqrt(right * top)];
  const taken = points.map((p) => [plot.X(p.x), plot.Y(p.y)]);
  for (const level of ticks(least, most, plot.width < 600 ? 6 : 9).reverse()) {
    const from = Math.max(left, level ** 2 / top);
    const to = bottom > 0 ? Math.min(right, level ** 2 / bottom) : right;
    if (level <= least || level >= most || to <= from) continue;
    const xs = Array.from({ length: 60 }, (_, i) => from + ((to - from) * i) / 59);
    const ys = xs.map((x) => level ** 2 / x);
    plot.svg.append(draw("path", { class: "contour", d: lineOf(plot, xs, ys) }));
    labelContour(plot, xs.map(plot.X), ys.map(plot.Y), `ART ${short(level)}`, taken);
  }
}

// Low on its curve, where methods are rarely to be found; left out in a crowd or a corner.
function labelContour(plot, xs, ys, text, taken) {
  const [left, right] = [plot.box.left + 26, plot.width - plot.box.right - 26];
  const free = (i) => !taken.some(([x, y]) => Math.abs(x - xs[i]) < 54 && Math.abs(y - ys[i]) < 18);
  const inside = xs.map((_, i) => i).filter((i) => xs[i] > left && xs[i] < right && ys[i] < plot.base - 16);
  const at = inside.findLast(free);
  if (inside.length < 6 || at === undefined) return;
  taken.push([xs[at], ys[at]]);
  plot.svg.append(draw("text", { class: "halo", x: xs[at], y: ys[at] + 4, "text-anchor": "middle", text }));
}

const meet = (one, other) =>
  one.x < other.x + other.w && other.x < one.x + one.w && one.y < other.y + other.h && other.y < one.y + one.h;

// Each kappa beside its point, on the first side that is free; left out where none is. Rather not
// across a bar, but rather there than nowhere. The first of a method says what the numbers are.
function kappaLabels(plot, points) {
  const box = (p, dx, dy) => ({
    x: plot.X(p.x - dx), y: plot.Y(p.y + dy), w: plot.X(p.x + dx) - plot.X(p.x - dx), h: plot.Y(p.y - dy) - plot.Y(p.y + dy),
  });
  const bars = points.flatMap((p) => [box(p, p.dx, 0), box(p, 0, p.dy)]);
  const taken = points.map((p) => ({ x: plot.X(p.x) - 6, y: plot.Y(p.y) - 6, w: 12, h: 12 }));
  const named = new Set();
  for (const p of points) {
    const text = (named.has(p.group.series) ? "" : "κ ") + short(p.group.kappa);
    const [x, y, w] = [plot.X(p.x), plot.Y(p.y), 6.5 * text.length];
    const sides = [[8, -16], [8, 5], [-8 - w, -16], [-8 - w, 5]].map(([dx, dy]) => ({ x: x + dx, y: y + dy, w, h: 12 }));
    const allowed = sides.filter((side) => !taken.some((other) => meet(side, other)));
    const side = allowed.find((one) => !bars.some((bar) => meet(one, bar))) ?? allowed[0];
    if (!side) continue;
    named.add(p.group.series);
    taken.push(side);
    plot.svg.append(draw("text", { class: "kappa halo", x: side.x, y: side.y + 10, text, "aria-hidden": true }));
  }
}

// -- lines over radii or epochs --

// lines: {group, x, mean, low, high, upper}; low and high are the band over seeds, `upper` a
// second curve above the first with the room between them filled.
function lineChart(host, spec, lines) {
  const plot = frame(host, { role: "img", ...spec, label: `${spec.label} Arrow keys read the values.` });
  for (const { group, x, mean, low, high, upper } of lines) {
    const node = draw("g", { class: group.style.colour });
    if (low) node.append(draw("path", { class: "area", d: areaOf(plot, x, low, high) }));
    if (upper) {
      node.append(draw("path", { class: "area", d: areaOf(plot, x, mean, upper) }));
      node.append(draw("path", { class: "curve upper", d: lineOf(plot, x, upper) }));
    }
    node.append(draw("path", { class: "curve", "stroke-dasharray": dashes(group.style), d: lineOf(plot, x, mean) }));
    const every = Math.max(1, Math.floor(x.length / 8));
    x.forEach((at, i) => {
      if (i % every === 0) node.append(marker(group.style, plot.X(at), plot.Y(mean[i]), 3.6));
    });
    plot.svg.append(node);
  }
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const says = (line, i) => line.upper
    ? `${spec.value(line.mean[i])} to ${spec.value(line.upper[i])}` : spec.value(line.mean[i]);
  const at = (line, x) => line.x.indexOf(x);
  follow(plot, xs.map(plot.X), (i) => [
    `${spec.xWord} ${short(xs[i])}`,
    lines.filter((line) => at(line, xs[i]) >= 0).map((line) => [line.group.style, line.group.label, says(line, at(line, xs[i]))]),
  ]);
  return {
    head: [spec.xWord, ...lines.map((line) => line.group.label)],
    rows: xs.map((x) => [short(x), ...lines.map((line) => (at(line, x) < 0 ? "–" : says(line, at(line, x))))]),
  };
}

const asPercent = (share) => short(100 * share);

// Shares by radius. The axis starts at 0, or higher where every line stays above half.
function shareChart(host, yName, label, lines) {
  const least = lowest(lines.flatMap((line) => line.low ?? line.mean));
  const floor = least > 0.5 ? Math.min(9, Math.floor(10 * least)) / 10 : 0;
  return lineChart(host, {
    x: [0, DATA.max_radius], y: [floor, 1], yTicks: ticks(floor, 1, 5), yText: asPercent, yName, label,
    xName: "Radius (ℓ∞)", xWord: "Radius", value: (share) => `${percent(share)} %`,
  }, lines);
}

function curves(host, groups) {
  return shareChart(host, "Certified accuracy (%)", "Certified accuracy by radius.",
    groups.map((group) => ({ group, x: DATA.radii, ...group.curve })));
}

function gap(host, groups) {
  return shareChart(host, "Robust accuracy (%)", "Certified accuracy and accuracy under attack by radius.",
    groups.map((group) => ({ group, x: DATA.radii, ...group.gap })));
}

function training(host, groups) {
  const panels = DATA.tracks.map((track) => ({
    ...track, place: make("div"),
    lines: groups.filter((group) => group.tracks[track.name]).map((group) => ({ group, ...group.tracks[track.name] })),
  })).filter((panel) => panel.lines.length);
  // All of them before the first is drawn: each is as wide as the others leave room for.
  host.replaceChildren(...panels.map(({ title, place }) => make("div", {}, make("h3", { text: title }), place)));
  const tables = panels.map(({ title, factor, lines, place }) => {
    const values = lines.flatMap((line) => [...line.mean, ...(line.low ?? []), ...(line.high ?? [])]);
    const [low, high] = extent(values, 0.04);
    const epochs = lines.flatMap((line) => line.x);
    return [title, lineChart(place, {
      x: [lowest(epochs) - (new Set(epochs).size > 1 ? 0 : 1), highest(epochs)],
      y: [lowest(values) >= 0 ? Math.max(low, 0) : low, high],
      yName: "", xName: "Epoch", xWord: "Epoch", whole: true, height: 220,
      value: (value) => (factor === 100 ? `${value.toFixed(2)} %` : short(value)), label: `${title} by epoch.`,
    }, lines)];
  });
  const heads = ["Epoch", ...groups.map((group) => group.label)];
  return {
    head: ["Figure", ...heads],
    rows: tables.flatMap(([title, table]) => table.rows.map((row) => [title, ...aligned(heads, table.head, row)])),
  };
}

// A row under the heads of another table, since a panel may lack some groups.
function aligned(heads, own, row) {
  return heads.map((head) => (own.includes(head) ? row[own.indexOf(head)] : "–"));
}

// -- shares and classes --

function distribution(host, groups) {
  const { edges } = DATA;
  const bins = edges.length - 1;
  // Cells: 0 for exactly zero, 1 to bins, bins + 1 for exactly the maximum, the ends set apart.
  const place = (cell) => (cell === 0 ? 0 : cell === bins + 1 ? bins + 3 : cell + 1);
  const share = (group, cell) =>
    (cell === 0 ? group.distribution.zero : cell === bins + 1 ? group.distribution.max : group.distribution.share[cell - 1]);
  const cells = Array.from({ length: bins + 2 }, (_, i) => i);
  const inner = ticks(0, DATA.max_radius, Math.max(2, Math.floor(host.clientWidth / 110)))
    .filter((at) => at > 0 && at < 0.85 * DATA.max_radius).map((at) => [1.5 + (bins * at) / DATA.max_radius, short(at)]);
  const plot = frame(host, {
    x: [-0.8, bins + 3.8], y: [0, 1], root: true, yTicks: [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], role: "img",
    xTicks: [[0, "0"], ...inner, [bins + 3, `${short(DATA.max_radius)}`]], xName: "Certified radius", yName: "Share of images (%)", yText: asPercent,
    label: "Share of test images by certified radius. Arrow keys read the values.",
  });
  for (const group of groups) {
    const xs = group.distribution.share.flatMap((_, i) => [i + 1.5, i + 2.5]);
    const ys = group.distribution.share.flatMap((value) => [value, value]);
    const node = draw("g", { class: group.style.colour });
    node.append(draw("path", { class: "curve", "stroke-dasharray": dashes(group.style), d: lineOf(plot, xs, ys) }));
    for (const cell of [0, bins + 1]) node.append(marker(group.style, plot.X(place(cell)), plot.Y(share(group, cell)), 5));
    plot.svg.append(node);
  }
  const name = (cell) => {
    if (cell === 0) return "Exactly 0";
    if (cell === bins + 1) return `Exactly ${short(DATA.max_radius)}`;
    return `${short(edges[cell - 1])} to ${short(edges[cell])}`;
  };
  follow(plot, cells.map((cell) => plot.X(place(cell))), (cell) => [
    name(cell), groups.map((group) => [group.style, group.label, `${percent(share(group, cell))} %`]),
  ]);
  return {
    head: ["Certified radius", ...groups.map((group) => group.label)],
    rows: cells.map((cell) => [name(cell), ...groups.map((group) => `${percent(share(group, cell))} %`)]),
  };
}

function classes(host, groups) {
  const names = DATA.classes;
  const values = groups.flatMap(({ classes: { mean, low, high } }) => [mean, low ?? [], high ?? []]).flat();
  const [least, most] = extent(values.filter(present));
  const y = [Math.max(least, 0), most];
  const table = {
    head: ["Class", ...groups.map((group) => group.label)],
    rows: names.map((name, i) => [name, ...groups.map(({ classes: { mean } }) => (present(mean[i]) ? short(mean[i]) : "–"))]),
  };
  if (names.length > 20) {
    const ranked = groups.map((group) => {
      const mean = group.classes.mean.filter(present).sort((a, b) => b - a);
      return { group, x: mean.map((_, i) => i + 1), mean };
    });
    lineChart(host, {
      x: [1, names.length], y, xName: "Class, by rank", xWord: "Rank", yName: "Mean certified radius",
      value: short, label: "Mean certified radius by rank of class.",
    }, ranked);
    return table;
  }
  const long = names.some((name) => name.length > 3);
  const cut = (name) => (name.length > 10 ? `${name.slice(0, 9)}…` : name);
  const plot = frame(host, {
    x: [-0.6, names.length - 0.4], y, role: "img", categories: true, slanted: long,
    xTicks: names.map((name, i) => [i, cut(name)]), xName: "Class", yName: "Mean certified radius",
    label: "Mean certified radius by class. Arrow keys read the values.",
  });
  groups.forEach((group, k) => {
    const { mean, low, high } = group.classes;
    const node = draw("g", { class: group.style.colour });
    const aside = 0.66 * ((k + 0.5) / groups.length - 0.5);
    mean.forEach((value, i) => {
      if (!present(value)) return;
      const x = plot.X(i + aside);
      if (low) node.append(draw("line", { class: "bar-line", x1: x, x2: x, y1: plot.Y(low[i]), y2: plot.Y(high[i]) }));
      node.append(marker(group.style, x, plot.Y(value), groups.length > 8 ? 3 : 4.2));
    });
    plot.svg.append(node);
  });
  follow(plot, names.map((_, i) => plot.X(i)), (i) => [
    `Class ${names[i]}`,
    groups.filter((group) => present(group.classes.mean[i])).map((group) => [group.style, group.label, short(group.classes.mean[i])]),
  ]);
  return table;
}

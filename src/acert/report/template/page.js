// The page: what is shown, the controls that change it, and everything drawn anew when they do.

const DATA = JSON.parse(byId("data").textContent);
// A series is a method, or one of its variants: what has a colour and a place in the legend.
const state = { hidden: new Set(), kappa: "smallest" };

for (const group of DATA.groups) group.style = DATA.series[group.series];

// -- which groups are shown --

const visible = (groups) => groups.filter((group) => !state.hidden.has(group.style));
const certified = (groups) => groups.filter((group) => group.n > 0);

function atKappa(groups) {
  if (state.kappa === "all") return groups;
  if (state.kappa !== "smallest") return groups.filter((group) => group.kappa === state.kappa);
  return groups.filter((group, i) => groups.findIndex((other) => other.series === group.series) === i);
}

// -- figures --

const FIGURES = [
  ["trade-off", tradeOff, () => visible(certified(DATA.groups))],
  ["curves", curves, () => visible(atKappa(certified(DATA.groups)))],
  ["gap", gap, () => visible(atKappa(certified(DATA.groups))).filter((group) => group.gap)],
  ["distribution", distribution, () => visible(atKappa(certified(DATA.groups)))],
  ["classes", classes, () => visible(atKappa(certified(DATA.groups)))],
  ["training", training, () => visible(atKappa(DATA.groups)).filter((group) => Object.keys(group.tracks).length)],
];

function show(id, drawn, chosen) {
  const figure = byId(id);
  if (figure.hidden) return;
  const host = figure.querySelector(".plot");
  const groups = chosen();
  figure.table = groups.length ? drawn(host, groups) : null;
  if (!figure.table) host.replaceChildren(make("p", { text: BARE }));
  fillTable(figure);
}

function fillTable(figure) {
  const details = figure.querySelector("details");
  details.hidden = !figure.table;
  // A long table is made only once somebody opens it.
  if (details.open && figure.table) {
    details.querySelector(".scroll").replaceChildren(plainTable(figure.table, figure.querySelector("h2").textContent));
  }
}

function addTable(figure) {
  const title = figure.querySelector("h2").textContent;
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Data: ${title}` });
  figure.append(make("details", { on: { toggle: () => fillTable(figure) } },
    make("summary", { text: "Data table" }), scroll));
}

function showImages() {
  const chosen = visible(atKappa(certified(DATA.groups)));
  const cards = DATA.examples.filter((one) => chosen.includes(DATA.groups[one.group])).map((one) => {
    const group = DATA.groups[one.group];
    const card = make("div", {}, make("h3", {}, make("i", { class: `swatch-cell ${group.style.colour}` }), group.label));
    card.append(make("p", { class: "order", text: `Most certified, ${one.run}` }), pictures(one.most));
    card.append(make("p", { class: "order", text: `Least certified, ${one.run}` }), pictures(one.least));
    return card;
  });
  byId("examples").hidden = DATA.examples.length === 0;
  const bare = make("p", { class: "words", text: "No images of these settings are in this file." });
  byId("examples").querySelector(".list").replaceChildren(...(cards.length ? cards : [bare]));
}

function pictures(entries) {
  return make("ul", { class: "pictures" }, ...entries.map(([image, label, prediction, radius, index]) => {
    const name = (i) => DATA.classes[i] ?? String(i);
    const right = label === prediction;
    const words = right ? name(label) : `${name(label)} as ${name(prediction)}`;
    const { source, coarse } = DATA.images[image];
    const picture = make("img", {
      src: source, class: coarse ? "coarse" : null, width: 64, height: 64,
      alt: `Test image ${index}, ${words}`,
    });
    const caption = make("div", { class: right ? "name" : "name wrong", title: words, text: words });
    return make("li", {}, picture, make("b", { text: String(Number(radius.toPrecision(3))) }), caption);
  }));
}

function render() {
  hush();
  for (const entry of FIGURES) show(...entry);
  showImages();
}

// -- controls --

function controls() {
  for (const series of DATA.series) {
    const sample = draw("svg", { width: 30, height: 14, "aria-hidden": true, class: series.colour });
    sample.append(draw("path", { class: "curve", "stroke-dasharray": dashes(series), d: "M0,7H30" }), marker(series, 15, 7, 4.5));
    const button = make("button", { type: "button", "aria-pressed": true, title: `Show or hide ${series.name}` },
      sample, make("span", { text: series.name }));
    button.addEventListener("click", () => {
      const hide = !state.hidden.has(series);
      if (hide) state.hidden.add(series);
      else state.hidden.delete(series);
      button.setAttribute("aria-pressed", !hide);
      render();
    });
    byId("methods").append(button);
  }
  const kappas = [...new Set(DATA.groups.map((group) => group.kappa))].sort((a, b) => a - b);
  const buttons = ["smallest", ...kappas, "all"].map((kappa) => {
    const text = typeof kappa === "number" ? short(kappa) : kappa;
    const button = make("button", { type: "button", "aria-pressed": kappa === state.kappa, text });
    button.addEventListener("click", () => {
      state.kappa = kappa;
      for (const other of buttons) other.setAttribute("aria-pressed", other === button);
      render();
    });
    return button;
  });
  byId("kappas").append(...buttons);
  byId("kappas").parentElement.hidden = kappas.length === 1;
  const theme = byId("theme");
  const preferred = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const dark = () => (document.documentElement.dataset.theme ?? preferred()) === "dark";
  theme.setAttribute("aria-pressed", dark());
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    theme.setAttribute("aria-pressed", dark());
  });
}

// -- words --

function words() {
  byId("facts").textContent = DATA.facts;
  byId("made").textContent = DATA.made;
  byId("classes-words").textContent = DATA.classes.length > 20
    ? "Mean certified radius of each class, from the most to the least certified."
    : "Mean certified radius of each class; bars go from the lowest to the highest seed.";
  for (const { word, value, spread, of } of DATA.tiles) {
    byId("tiles").append(make("li", {}, make("span", { class: "word", text: word }),
      make("span", { class: "value", text: value }), make("span", { class: "spread", text: spread }),
      make("span", { class: "of", text: of })));
  }
  byId("alarms").hidden = DATA.alarms.length === 0;
  byId("alarms").append(...DATA.alarms.map((text) => make("p", { text })));
  byId("complaints").hidden = DATA.complaints.length === 0;
  byId("complaints").querySelector("ul").append(...DATA.complaints.map((text) => make("li", { text })));
  byId("gap").hidden = !DATA.groups.some((group) => group.gap);
}

words();
controls();
for (const [id] of FIGURES) addTable(byId(id));
results();
render();
// A new width needs new ticks, not a stretched picture.
let width = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  render();
}).observe(document.body);
window.addEventListener("scroll", hush, { passive: true });

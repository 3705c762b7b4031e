"use strict";
// Curves with zoom and cursor, a gallery, and three explorers. Without this script the page shows
// the curves and positions, without interaction. Text is only ever set as textContent; nothing is fetched.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  function element(name, attributes = {}, text = "") {
    const svg = ["svg", "g", "path", "line", "rect", "text", "image", "circle", "title"];
    const made = svg.includes(name) ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== "") made.textContent = text;
    return made;
  }

  function bytes(text) {
    return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  }

  function short(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(4)));
  }

  // ---------------------------------------------------------------------------- curves

  function ticks(low, high, most) {
    const rough = (high - low) / most;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((f) => f * unit >= rough);
    const found = [];
    for (let v = Math.ceil(low / step) * step; v <= high + 1e-9 * step; v += step) found.push(Number(v.toPrecision(12)));
    return found;
  }

  class Chart {
    constructor(place, chart) {
      this.lines = chart.lines;
      this.box = { left: 52, right: 314, top: 8, bottom: 132 };
      const steps = this.lines.flatMap((line) => line.step);
      this.all = [Math.min(...steps), Math.max(...steps)];
      if (this.all[0] === this.all[1]) this.all[1] += 1;
      this.range = [...this.all];
      this.cursor = null;
      this.svg = element("svg", { viewBox: "0 0 330 166", tabindex: 0, role: "application", class: "chart",
        "aria-label": `${chart.title}: arrow keys read values, + and - zoom, 0 shows everything` });
      this.said = element("p", { class: "readout", "aria-live": "polite" });
      place.append(this.svg, this.said);
      if (this.lines.some((line) => line.run > 0)) place.append(this.legend());
      this.svg.addEventListener("pointermove", (e) => this.move(e));
      this.svg.addEventListener("pointerdown", (e) => { this.from = this.step(e); this.svg.setPointerCapture(e.pointerId); });
      this.svg.addEventListener("pointerup", (e) => this.drop(e));
      this.svg.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
      this.svg.addEventListener("dblclick", () => this.zoom(...this.all));
      this.svg.addEventListener("keydown", (e) => this.key(e));
      this.draw();
    }

    step(event) {
      const place = this.svg.getBoundingClientRect();
      const x = ((event.clientX - place.left) / place.width) * 330;
      const share = Math.min(1, Math.max(0, (x - this.box.left) / (this.box.right - this.box.left)));
      return this.range[0] + share * (this.range[1] - this.range[0]);
    }

    move(event) {
      this.cursor = this.step(event);
      this.draw();
    }

    drop(event) {
      const [a, b] = [this.from, this.step(event)].sort((x, y) => x - y);
      this.from = null;
      if (b - a > 0.03 * (this.range[1] - this.range[0])) this.zoom(a, b);
    }

    zoom(low, high) {
      this.range = [Math.max(low, this.all[0]), Math.min(high, this.all[1])];
      this.draw();
    }

    key(event) {
      const [low, high] = this.range, middle = this.cursor ?? (low + high) / 2, wide = high - low;
      const move = { ArrowLeft: -0.03, ArrowRight: 0.03 }[event.key];
      if (move) {
        this.cursor = Math.min(high, Math.max(low, middle + move * wide));
        this.draw();
      } else if (event.key === "+" || event.key === "=") this.zoom(middle - wide / 4, middle + wide / 4);
      else if (event.key === "-") this.zoom(middle - wide, middle + wide);
      else if (event.key === "0" || event.key === "Escape") this.zoom(...this.all);
      else return;
      event.preventDefault();
    }

    draw() {
      const { left, right, top, bottom } = this.box, [from, to] = this.range;
      const shown = this.lines.map((line) => line.step.map((s, i) => i).filter((i) => line.step[i] >= from && line.step[i] <= to));
      const values = this.lines.flatMap((line, k) => shown[k].flatMap((i) => [line.low[i], line.high[i]]));
      let low = Math.min(...values), high = Math.max(...values);
      if (!Number.isFinite(low)) [low, high] = [0, 1];
      const room = Math.max(0.04 * (high - low), 2e-3 * Math.max(Math.abs(low), Math.abs(high)), 1e-12);
      low -= room;
      high += room;
      const x = (s) => left + ((s - from) / (to - from)) * (right - left);
      const y = (v) => bottom - ((v - low) / (high - low)) * (bottom - top);
      const parts = [];
      for (const v of ticks(low, high, 4)) {
        parts.push(element("line", { x1: left, x2: right, y1: y(v), y2: y(v), class: "rule" }));
        parts.push(element("text", { x: left - 6, y: y(v) + 3.5, "text-anchor": "end" }, short(v)));
      }
      for (const s of ticks(from, to, 4)) {
        parts.push(element("text", { x: x(s), y: bottom + 16, "text-anchor": "middle" }, s.toLocaleString("en")));
      }
      parts.push(element("text", { x: (left + right) / 2, y: bottom + 31, "text-anchor": "middle" }, "step"));
      const told = [];
      this.lines.forEach((line, k) => {
        const index = shown[k], style = this.style(line, k);
        if (!index.length) return;
        const up = index.map((i) => `${x(line.step[i])},${y(line.high[i])}`);
        const down = index.map((i) => `${x(line.step[i])},${y(line.low[i])}`).reverse();
        if (index.length > 1) parts.push(element("path", { d: `M${[...up, ...down].join("L")}Z`, class: `${style} band` }));
        parts.push(element("path", { d: `M${index.map((i) => `${x(line.step[i])},${y(line.mean[i])}`).join("L")}`, class: style }));
        if (index.length < 12) for (const i of index) parts.push(element("circle", { cx: x(line.step[i]), cy: y(line.mean[i]), r: 2.2, class: `${style} dot` }));
        if (this.cursor !== null) {
          const near = index.reduce((a, b) => (Math.abs(line.step[b] - this.cursor) < Math.abs(line.step[a] - this.cursor) ? b : a));
          parts.push(element("circle", { cx: x(line.step[near]), cy: y(line.mean[near]), r: 3.4, class: `${style} dot` }));
          const who = line.run || this.lines.some((l) => l.run) ? `${line.name}, ` : "";
          told.push(`${who}${line.label} ${short(line.mean[near])} at step ${Math.round(line.step[near]).toLocaleString("en")}`);
        }
      });
      if (this.cursor !== null) parts.push(element("line", { x1: x(this.cursor), x2: x(this.cursor), y1: top, y2: bottom, class: "cursor" }));
      if (this.from != null && this.cursor !== null) {
        const [a, b] = [x(this.from), x(this.cursor)].sort((p, q) => p - q);
        parts.push(element("rect", { x: a, y: top, width: b - a, height: bottom - top, class: "chosen" }));
      }
      this.svg.replaceChildren(...parts);
      this.said.textContent = told.join("; ");
    }

    legend() {
      const list = element("p", { class: "names" });
      this.lines.forEach((line, k) => {
        const key = element("svg", { viewBox: "0 0 18 6", class: "chart" });
        key.append(element("path", { d: "M0,3L18,3", class: this.style(line, k) }));
        const item = element("span", { title: line.name });
        item.append(key, element("span", {}, `${line.label}, ${line.name}`));
        list.append(item);
      });
      return list;
    }

    style(line, k) {
      if (line.run < 0) return `series s${1 + line.series} reference`;
      return `series s${1 + (k % 6)}${line.run ? " other" : ""}`;
    }
  }

  data.charts.forEach((chart, i) => {
    const place = document.getElementById(`chart-${i}`);
    if (place) new Chart(place, chart);
  });

  // ---------------------------------------------------------------------------- neighbours

  function picture(given, i, attributes = {}) {
    return element("img", { src: given.pictures[i], alt: given.names[i], title: given.names[i], ...attributes });
  }

  // An image with its neighbours, one row per encoder; those of its kind are framed.
  function neighbourhood(given, query, kind) {
    const card = element("figure");
    card.append(picture(given, query, { class: "query" }));
    for (const { name, nearest } of given.encoders) {
      const row = element("div", { class: "near" });
      row.append(element("span", {}, name.replace(" training", "")));
      for (const i of nearest[query]) {
        const same = kind && kind.of[query] >= 0 && kind.of[i] === kind.of[query];
        row.append(picture(given, i, same ? { class: "same" } : {}));
      }
      card.append(row);
    }
    return card;
  }

  class Places {
    // The map of one encoder. `point` is called for the image under the pointer, `choose` on a click.
    constructor(place, given, encoder, point, choose) {
      this.given = given;
      this.encoder = encoder;
      this.at = encoder.places.map(([x, y]) => [4 + 92 * x, 4 + 92 * y]);
      const box = element("figure");
      box.append(element("figcaption", {}, encoder.name));
      this.svg = element("svg", { viewBox: "0 0 100 100", tabindex: 0, role: "application", class: "places",
        "aria-label": `map, ${encoder.name}: arrow keys go from image to image` });
      this.dots = this.at.map(([x, y]) => element("circle", { cx: x, cy: y, r: 1.1 }));
      this.rings = element("g");
      this.frame = element("rect", { class: "thumb", width: 21, height: 21 });
      this.image = element("image", { width: 20, height: 20, preserveAspectRatio: "xMidYMid slice" });
      this.svg.append(this.rings, ...this.dots, this.frame, this.image);
      box.append(this.svg);
      place.append(box);
      this.svg.addEventListener("pointermove", (e) => point(this.nearest(e)));
      this.svg.addEventListener("click", (e) => choose(this.nearest(e)));
      this.svg.addEventListener("pointerleave", () => point(null));
      this.svg.addEventListener("keydown", (e) => {
        const way = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[e.key];
        if (!way) return;
        e.preventDefault();
        choose((this.chosen + way + this.at.length) % this.at.length);
      });
    }

    nearest(event) {
      const place = this.svg.getBoundingClientRect();
      const x = (100 * (event.clientX - place.left)) / place.width, y = (100 * (event.clientY - place.top)) / place.height;
      const far = this.at.map((p) => (p[0] - x) ** 2 + (p[1] - y) ** 2);
      return far.indexOf(Math.min(...far));
    }

    colour(kind) {
      this.dots.forEach((dot, i) => dot.setAttribute("class", !kind ? "" : kind.of[i] >= 0 ? `kind-${kind.of[i]}` : "unknown"));
    }

    show(chosen, shown) {
      this.chosen = chosen;
      this.rings.replaceChildren(...[chosen, ...this.encoder.nearest[chosen]].map((i, k) =>
        element("circle", { cx: this.at[i][0], cy: this.at[i][1], r: k ? 1.9 : 2.6, class: k ? "ring" : "ring chosen" })));
      const [x, y] = this.at[shown];
      const corner = [x < 50 ? x + 2 : x - 23, y < 50 ? y + 2 : y - 23];
      for (const [part, inset] of [[this.frame, 0], [this.image, 0.5]]) {
        part.setAttribute("x", corner[0] + inset);
        part.setAttribute("y", corner[1] + inset);
      }
      this.image.setAttribute("href", this.given.pictures[shown]);
    }
  }

  function exploreNeighbours(gallery, place, given) {
    const state = { chosen: given.queries[0], pointed: null, kind: given.kinds[0] };
    const controls = element("div", { class: "controls" }), names = element("p", { class: "legend kinds" });
    if (given.kinds.length > 1) {
      const label = element("label", {}, "Colours show "), select = element("select", { id: "kind" });
      given.kinds.forEach((kind, i) => select.append(element("option", { value: i }, kind.label)));
      select.addEventListener("change", () => { state.kind = given.kinds[select.value]; show(); });
      label.append(select);
      controls.append(label);
    }
    const pair = element("div", { class: "pair two" });
    const maps = given.encoders.map((encoder) => new Places(pair, given, encoder,
      (i) => { state.pointed = i; point(); }, (i) => { state.chosen = i; state.pointed = null; show(); }));
    const said = element("p", { class: "readout", id: "map-said", "aria-live": "polite" });
    const own = element("div", { class: "gallery", id: "chosen" });
    place.append(controls, names, pair, said, own);

    function point() {
      const shown = state.pointed ?? state.chosen, kind = state.kind;
      for (const map of maps) map.show(state.chosen, shown);
      const which = kind && kind.of[shown] >= 0 ? `, ${kind.label}: ${kind.names[kind.of[shown]]}` : "";
      said.textContent = `${given.names[shown]}${which}`;
    }

    function show() {
      for (const map of maps) map.colour(state.kind);
      const known = state.kind ? state.kind.names.map((name, i) => [`kind-${i}`, name]) : [];
      if (state.kind && state.kind.of.some((i) => i < 0)) known.push(["unknown", "no label"]);
      names.replaceChildren(...known.map(([colour, name]) => {
        const item = element("span");
        item.append(element("span", { class: `key ${colour}` }), name);
        return item;
      }));
      gallery.replaceChildren(...given.queries.map((query) => neighbourhood(given, query, state.kind)));
      own.replaceChildren(neighbourhood(given, state.chosen, state.kind));
      point();
    }
    show();
  }

  // ---------------------------------------------------------------------------- grids of patches

  // viridis at eight points: dark to light for any colour vision.
  const SCALE = [[68, 1, 84], [70, 50, 127], [54, 92, 141], [39, 127, 142], [31, 161, 135], [74, 194, 109], [159, 218, 58], [253, 231, 37]];

  function colour(value) {
    const at = (value / 255) * (SCALE.length - 1), i = Math.min(SCALE.length - 2, Math.floor(at));
    const mixed = SCALE[i].map((c, k) => Math.round(c + (at - i) * (SCALE[i + 1][k] - c)));
    return `rgb(${mixed.join(",")})`;
  }

  class Grid {
    // A square of patches over an optional picture. `allowed` patches can be chosen, by click or by
    // arrow keys.
    constructor(place, side, label, choose) {
      this.side = side;
      this.choose = choose;
      this.svg = element("svg", { viewBox: `0 0 ${side} ${side}`, tabindex: 0, role: "application", class: "patches", "aria-label": label });
      this.picture = element("image", { x: 0, y: 0, width: side, height: side, preserveAspectRatio: "none" });
      this.cells = [...Array(side * side).keys()].map((n) => {
        const cell = element("rect", { x: n % side, y: Math.floor(n / side), width: 1, height: 1, "data-patch": n });
        cell.addEventListener("click", () => { if (this.allowed.has(n)) this.choose(n); });
        return cell;
      });
      this.frames = ["outer", "inner"].map((name) => element("rect", { width: 1, height: 1, class: `frame ${name}` }));
      this.svg.append(this.picture, ...this.cells, ...this.frames);
      this.svg.addEventListener("keydown", (e) => this.key(e));
      this.allowed = new Set(this.cells.keys());
      place.append(this.svg);
    }

    key(event) {
      const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!way) return;
      event.preventDefault();
      let [row, col] = [Math.floor(this.chosen / this.side), this.chosen % this.side];
      for (let i = 0; i < this.side; i += 1) {
        row += way[0];
        col += way[1];
        if (row < 0 || col < 0 || row >= this.side || col >= this.side) return;
        if (this.allowed.has(row * this.side + col)) {
          this.choose(row * this.side + col);
          return;
        }
      }
    }

    show(values, chosen, opacity = 1) {
      this.chosen = chosen;
      this.cells.forEach((cell, n) => {
        cell.style.fill = values ? colour(values[n]) : "";
        cell.style.fillOpacity = values ? opacity : "";
      });
      for (const frame of this.frames) {
        frame.setAttribute("x", chosen % this.side);
        frame.setAttribute("y", Math.floor(chosen / this.side));
      }
    }
  }

  function named(patch, side) {
    return `row ${Math.floor(patch / side) + 1}, column ${(patch % side) + 1}`;
  }

  // ---------------------------------------------------------------------------- predictions

  function explorePredictions(place, given) {
    const { side, steps, images } = given;
    const state = { image: 0, step: steps.length - 1, row: 0 };
    const maps = images.map((image) => image.maps.map(bytes));
    const controls = element("div", { class: "controls" });
    const pick = element("div", { class: "picks", role: "group", "aria-label": "image" });
    images.forEach((image, i) => {
      const button = element("button", { type: "button", "aria-label": `image ${i + 1}` });
      button.append(element("img", { src: image.picture, alt: "", width: 56, height: 56 }));
      button.addEventListener("click", () => { state.image = i; state.row = middle(i); show(); });
      pick.append(button);
    });
    const label = element("label", {}, "Checkpoint ");
    const select = element("select", { id: "prediction-step" });
    steps.forEach((name, i) => select.append(element("option", { value: i }, name)));
    select.value = state.step;
    select.addEventListener("change", () => { state.step = Number(select.value); show(); });
    label.append(select);
    controls.append(pick, label);
    const pair = element("div", { class: "pair" });
    const [seenBox, heatBox] = ["visible part; choose a hidden patch", "patches that resemble the prediction"].map((title) => {
      const box = element("figure");
      box.append(element("figcaption", {}, title));
      pair.append(box);
      return box;
    });
    const choose = (patch) => { state.row = images[state.image].patches.indexOf(patch); show(); };
    const seen = new Grid(seenBox, side, "image: arrow keys choose a hidden patch", choose);
    const heat = new Grid(heatBox, side, "heat map: arrow keys choose a hidden patch", choose);
    const said = element("p", { class: "readout", id: "prediction-said", "aria-live": "polite" });
    place.append(controls, pair, said);

    function middle(i) {
      return Math.floor(images[i].patches.length / 2);
    }

    function show() {
      const image = images[state.image], patch = image.patches[state.row], n = side * side;
      const values = maps[state.image][state.step].subarray(state.row * n, (state.row + 1) * n);
      const hidden = new Set(image.patches), visible = new Set(image.context);
      for (const grid of [seen, heat]) {
        grid.picture.setAttribute("href", image.picture);
        grid.allowed = hidden;
      }
      seen.show(null, patch);
      seen.cells.forEach((cell, k) => cell.setAttribute("class", visible.has(k) ? "seen" : hidden.has(k) ? "hidden" : "unused"));
      heat.show(values, patch, 0.85);
      [...pick.children].forEach((button, k) => button.setAttribute("aria-pressed", k === state.image));
      const hottest = values.indexOf(Math.max(...values));
      const before = values.filter((v) => v > values[patch]).length;
      said.textContent = `${steps[state.step]}, hidden patch in ${named(patch, side)}: most similar to ${named(hottest, side)}; ` +
        `its own position ranks ${before + 1} of ${n}.`;
    }
    state.row = middle(0);
    show();
  }

  // ---------------------------------------------------------------------------- positions

  function explorePositions(place, given) {
    const { side, titles } = given, n = side * side;
    const maps = given.maps.map(bytes);
    const pair = element("div", { class: "pair three" });
    const grids = titles.map((title) => {
      const box = element("figure");
      box.append(element("figcaption", {}, title));
      pair.append(box);
      return new Grid(box, side, `${title}: arrow keys choose a position`, show);
    });
    const said = element("p", { class: "readout", id: "position-said", "aria-live": "polite" });
    place.append(pair, said);

    function show(query) {
      const shown = maps.map((map) => map.subarray(query * n, (query + 1) * n));
      grids.forEach((grid, k) => grid.show(shown[k], query));
      const cosine = (v) => (given.low + (v / 255) * (given.high - given.low)).toFixed(2);
      said.textContent = `Position in ${named(query, side)}: its cosine similarity to itself is ` +
        titles.map((title, k) => `${cosine(shown[k][query])} (${title})`).join(", ") +
        `. Colours go from ${given.low} to ${given.high}.`;
    }
    show(Math.floor(side / 2) * side + Math.floor(side / 2));
  }

  // On narrow screens a row of a table becomes a list, and each cell is named by its column.
  for (const table of document.querySelectorAll(".scroll table")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    for (const row of table.querySelectorAll("tbody tr")) [...row.children].forEach((cell, i) => { cell.dataset.title = titles[i]; });
  }

  if (data.neighbours) exploreNeighbours(document.getElementById("gallery"), document.getElementById("maps"), data.neighbours);
  if (data.predictions) explorePredictions(document.getElementById("prediction-explorer"), data.predictions);
  if (data.positions) explorePositions(document.getElementById("position-explorer"), data.positions);
  document.documentElement.classList.add("alive");
})();

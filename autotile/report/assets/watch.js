"use strict";
// Follows sessions: asks for the list once a second, and for the charts of a session that is shown only if it changed.

(() => {
  const POLL_MS = 1000;
  const RETRY_MS = 3000;
  const STATES = {
    running: (session) => `running, ${session.elapsed}`,
    ended: (session) => `ended after ${session.elapsed}`,
    silent: (session) => `no trial for ${session.silent}: it compiles, or it was killed`,
  };

  const byId = (id) => document.getElementById(id);
  const chosen = new Map(); // sessions that the reader has shown or hidden, by name
  const columns = new Map();

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function row(cells, tag = "td") {
    const made = element("tr");
    for (const cell of cells) made.append(cell instanceof Node ? cell : element(tag, cell));
    return made;
  }

  // Charts are drawn when they come into view: many sessions side by side have more than a browser draws at once.
  const inView = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.visible = entry.isIntersecting;
      drawIfNeeded(entry.target);
    }
  }, { rootMargin: "200px" });

  function drawIfNeeded(plot) {
    if (!plot.visible || !plot.pending) return;
    const figure = plot.pending;
    plot.pending = null;
    draw(plot, figure);
  }

  // Figures come in the colours of the light theme; each has a counterpart of the same role in the dark one.
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let colours = new Map();
  let palettes = [{}, {}];
  const page = {
    themed: (value) => (dark.matches ? themed(value) : value),
    colour: (role) => palettes[dark.matches ? 1 : 0][role],
  };

  function themed(value) {
    if (typeof value === "string") return colours.get(value) ?? value;
    if (Array.isArray(value)) return value.map(themed);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, themed(part)]));
  }

  function draw(plot, figure) {
    plot.figure = figure;
    if (figure.data.some((trace) => trace.type === "parcoords")) {
      if (plot.parallel) plot.parallel.update(figure);
      else plot.parallel = new Parallel(plot, figure, page);
      return;
    }
    const { data, layout } = dark.matches ? themed(figure) : figure;
    const kept = { ...layout, uirevision: plot.dataset.chart }; // what the reader has zoomed stays
    window.Plotly.react(plot, data, kept, { displayModeBar: false, responsive: true });
  }

  dark.addEventListener("change", () => {
    for (const plot of document.querySelectorAll(".plot")) if (plot.figure) draw(plot, plot.figure);
  });

  class Column {
    constructor(name) {
      this.name = name;
      this.version = "";
      this.number = 0;
      this.charts = new Map();
      this.root = element("section", undefined, "session");
      this.root.id = `session-${name}`;
      this.heading = element("h2");
      this.place = element("p", undefined, "place");
      this.state = element("p", undefined, "state");
      this.bar = element("progress");
      this.bar.max = 1;
      this.left = element("span");
      this.progress = element("p", undefined, "progress");
      this.progress.append(this.bar, this.left);
      this.facts = element("dl");
      this.plots = element("div", undefined, "charts");
      const latest = element("details", undefined, "latest");
      latest.open = true;
      latest.append(element("summary", "Newest trials"));
      const table = element("table");
      const head = element("thead");
      head.append(row(["trial", "outcome", "time", "configuration", "reason"], "th"));
      this.latest = element("tbody");
      table.append(head, this.latest);
      const scroll = element("div", undefined, "scroll");
      scroll.append(table);
      latest.append(scroll);
      this.root.append(this.heading, this.place, this.state, this.progress, this.facts, this.plots, latest);
    }

    list(session) {
      this.heading.textContent = `${session.kernel} ${session.problem}`;
      this.place.textContent = session.host ? `${session.device}, ${session.host}` : session.device;
      const trials = `${session.trials.toLocaleString("en")} ${session.trials === 1 ? "trial" : "trials"}`;
      this.state.textContent = `${STATES[session.state](session)}; ${trials}`;
      this.root.dataset.state = session.state;
      this.progress.hidden = session.progress === null;
      if (session.progress === null) return;
      const { share, text, left } = session.progress;
      this.bar.value = share;
      this.bar.setAttribute("aria-label", text);
      this.left.textContent = [text, session.state === "silent" ? "" : left].filter(Boolean).join(", ");
    }

    async update(session) {
      if (this.version === session.version) return;
      const found = await ask(`session/${encodeURIComponent(session.name)}?since=${this.number}`);
      if (!found.charts) return; // not read or not drawn yet
      const { facts, latest, order } = found.texts;
      this.number = found.number;
      if (found.version === session.version) this.version = session.version;
      this.facts.replaceChildren(...facts.flatMap(([label, text]) => [element("dt", label), element("dd", text)]));
      this.latest.replaceChildren(...latest.map((cells) => row(cells)));
      for (const chart of found.charts) this.change(chart);
      const shown = order.map((name) => this.charts.get(name)).filter((one) => one && one.hasFigure);
      for (const [name, one] of this.charts) if (!order.includes(name) || !one.hasFigure) one.root.remove();
      shown.forEach((one, place) => {
        if (this.plots.children[place] !== one.root) this.plots.insertBefore(one.root, this.plots.children[place] ?? null);
      });
    }

    change({ texts, figure }) {
      let one = this.charts.get(texts.name);
      if (!one) {
        one = { root: element("figure"), title: element("h3"), plot: element("div", undefined, "plot") };
        one.caption = element("figcaption");
        one.table = element("table");
        one.root.dataset.chart = one.plot.dataset.chart = texts.name;
        const numbers = element("details");
        const scroll = element("div", undefined, "scroll");
        scroll.append(one.table);
        numbers.append(element("summary", "Numbers"), scroll);
        one.root.append(one.title, one.plot, one.caption, numbers);
        inView.observe(one.plot);
        this.charts.set(texts.name, one);
      }
      one.hasFigure = figure !== null;
      one.title.textContent = texts.title;
      one.caption.textContent = [texts.summary, texts.note].filter(Boolean).join(" ");
      one.plot.setAttribute("role", "img");
      one.plot.setAttribute("aria-label", texts.summary);
      const head = element("thead");
      const body = element("tbody");
      head.append(row(texts.headings, "th"));
      body.append(...texts.rows.map((cells) => row(cells)));
      one.table.replaceChildren(head, body);
      if (figure !== null) {
        one.plot.pending = figure;
        one.plot.style.minHeight = `${figure.layout.height ?? 300}px`; // nothing moves when it is drawn
        drawIfNeeded(one.plot);
      }
    }

    remove() {
      for (const one of this.charts.values()) {
        inView.unobserve(one.plot);
        if (one.plot.parallel) one.plot.parallel.close();
        else window.Plotly.purge(one.plot);
      }
      this.root.remove();
    }
  }

  async function ask(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  // Each GPU of each host has its running sessions, or else the newest that ended.
  function defaults(sessions) {
    const shown = new Set(sessions.filter((one) => one.state === "running").map((one) => one.name));
    const places = new Set();
    const place = (one) => `${one.database}\n${one.host}\n${one.device}`;
    for (const one of sessions) if (shown.has(one.name)) places.add(place(one));
    for (const one of sessions) {
      if (!places.has(place(one))) {
        places.add(place(one));
        shown.add(one.name);
      }
    }
    return shown;
  }

  function listSessions(sessions, shown) {
    const rows = sessions.map((session) => {
      const box = element("input");
      box.type = "checkbox";
      box.checked = shown.has(session.name);
      box.dataset.session = session.name;
      box.setAttribute("aria-label", `show ${session.kernel} ${session.problem}`);
      const cell = element("td");
      cell.append(box);
      const left = session.state === "running" ? session.progress?.left ?? "" : "";
      const figures = [session.trials.toLocaleString("en"), session.elapsed].map((text) => element("td", text, "number"));
      return row([cell, session.kernel, session.problem, session.device, session.host, session.state, ...figures, left,
        session.database]);
    });
    const focused = document.activeElement?.dataset?.session;
    byId("sessions").replaceChildren(...rows);
    if (focused) byId("sessions").querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
  }

  byId("sessions").addEventListener("change", (event) => {
    chosen.set(event.target.dataset.session, event.target.checked);
  });

  let listed = "";

  async function poll() {
    const { databases, sessions } = await ask("state");
    const messages = databases.filter((one) => one.message).map((one) => `${one.location}: ${one.message}`);
    if (byId("messages").textContent !== messages.join("")) {
      byId("messages").replaceChildren(...messages.map((text) => element("li", text)));
    }
    const shown = defaults(sessions);
    for (const [name, isShown] of chosen) isShown ? shown.add(name) : shown.delete(name);
    const list = JSON.stringify([sessions, [...shown]]);
    if (list !== listed) listSessions(sessions, shown);
    listed = list;
    for (const [name, column] of columns) {
      if (!shown.has(name) || !sessions.some((one) => one.name === name)) {
        column.remove();
        columns.delete(name);
      }
    }
    for (const session of sessions) {
      if (!shown.has(session.name)) continue;
      if (!columns.has(session.name)) {
        columns.set(session.name, new Column(session.name));
        byId("columns").append(columns.get(session.name).root);
      }
      columns.get(session.name).list(session);
    }
    byId("columns").dataset.count = columns.size;
    await Promise.all(sessions.filter((one) => columns.has(one.name)).map((one) => columns.get(one.name).update(one)));
    const running = sessions.filter((one) => one.state === "running").length;
    document.title = running ? `(${running}) autotile watch` : "autotile watch";
    return running ? `${running} running` : "nothing is running";
  }

  async function follow() {
    let wait = POLL_MS;
    if (!document.hidden) {
      try {
        byId("connection").textContent = await poll();
        byId("connection").dataset.state = "connected";
      } catch (error) {
        byId("connection").textContent = "autotile watch cannot be reached: it has ended, or its host is asleep";
        byId("connection").dataset.state = "lost";
        wait = RETRY_MS;
      }
    }
    setTimeout(follow, wait);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) inView.takeRecords(); });
  ask("palette").then(([light, other]) => {
    palettes = [light, other];
    colours = new Map(Object.keys(light).map((role) => [light[role], other[role]]));
  }).finally(follow);
})();

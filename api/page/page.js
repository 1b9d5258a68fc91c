"use strict";
// Everything that comes from the controller is put into the page as text, never as HTML.

const REFRESH = 2000; // ms, also when no event came
const POINTS = 40; // of each chart
const pulls = new Map(); // "model group" -> [{version, seconds, bytes}]
let token = sessionStorage.getItem("weightdepot-token") || "";

function make(kind, text, classes) {
  const made = document.createElement(kind);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (classes) made.className = classes;
  return made;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (bytes >= 1000 && i < units.length - 1) { bytes /= 1000; i += 1; }
  return (i && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)) + " " + units[i];
}

function span(seconds) {
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 120) return seconds.toFixed(1) + " s";
  return Math.round(seconds / 60) + " min";
}

function ago(seconds) {
  const now = Date.now() / 1000 - seconds;
  return now < 5 ? "now" : (now < 120 ? Math.round(now) + " s" : span(now)) + " ago";
}

function table(headings, rows) {
  const made = make("table");
  const head = made.createTHead().insertRow();
  for (const heading of headings) {
    const cell = make("th", heading.replace(/^#/, ""), heading.startsWith("#") ? "n" : "");
    head.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, i) => {
      const cell = line.insertCell();
      if (headings[i].startsWith("#")) cell.className = "n";
      cell.append(value instanceof Node ? value : String(value ?? ""));
    });
  }
  const around = make("div", null, "scroll");
  around.append(made);
  return around;
}

const state = (name) => make("span", name, "state " + name);

function chart(title, points, unit, second) {
  const figure = make("figure");
  figure.append(make("figcaption", title));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 400 90");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const most = Math.max(...points.map((p) => p.value), 1e-12);
  const width = 400 / Math.max(points.length, 12);
  points.forEach((point, i) => {
    const bar = document.createElementNS(svg.namespaceURI, "rect");
    const height = Math.max(1, (74 * point.value) / most);
    const values = { x: i * width + 1, y: 76 - height, width: Math.max(1, width - 2), height };
    for (const [name, value] of Object.entries(values)) bar.setAttribute(name, value);
    bar.setAttribute("class", second ? "bar second" : "bar");
    const text = document.createElementNS(svg.namespaceURI, "title");
    text.textContent = "version " + point.version + ": " + unit(point.value);
    bar.append(text);
    svg.append(bar);
  });
  figure.append(svg);
  const last = points[points.length - 1];
  figure.append(make("div", last ? "version " + last.version + ": " + unit(last.value)
    + ", at most " + unit(most) : "nothing yet", "note"));
  return figure;
}

function versions(model) {
  const gone = (v) => v.state === "freed" || v.state === "aborted";
  const past = model.versions.filter(gone).slice(-5);
  const shown = model.versions.filter((v) => !gone(v) || past.includes(v)).reverse();
  const rows = shown.map((v) => {
    const notes = [];
    if (v.version === model.current) notes.push(model.held ? "held" : "current");
    if (v.pinned) notes.push("pinned");
    for (const tag of v.tags) notes.push("tag " + tag);
    if (v.live) notes.push("in place");
    if (v.state === "open") notes.push(v.sealed.length + " of " + v.world_size + " sealed");
    if (v.leases.length) notes.push("read by " + v.leases.join(", "));
    if (v.reason && v.state !== "freed") notes.push(v.reason);
    return [v.version, state(v.state), size(v.nbytes), ago(v.ready || v.opened), make("span", notes.join("; "), "note")];
  });
  return table(["#version", "state", "#size", "when", ""], rows);
}

function groups(model, list) {
  const rows = list.map((g) => {
    const late = make("span", g.lag, g.lag > (model.policy.mode === "bounded" ? model.policy.max_lag : 1) ? "late" : "");
    const holds = g.state === "moving" ? (g.last ?? "-") + " > " + g.target : (g.version ?? g.last ?? "-");
    const alive = g.members.filter((m) => m.alive).length;
    const notes = [];
    if (g.error) notes.push(g.error);
    if (g.leased.length) notes.push("reads version " + g.leased.join(", "));
    const staged = g.members.find((m) => m.staged !== null);
    if (staged) notes.push("staged " + staged.staged);
    return [g.group, state(g.state), holds, late, alive + "/" + g.world_size, make("span", notes.join("; "), "note")];
  });
  return table(["group", "state", "#holds", "#lag", "#alive", ""], rows);
}

function remember(model, list) {
  for (const g of list) {
    const key = model.name + " " + g.group;
    const done = g.members.map((m) => m.stats).filter((s) => s && s.pull > 0 && s.moved > 0);
    if (g.version === null || !done.length) continue;
    const points = pulls.get(key) || [];
    if (points.length && points[points.length - 1].version === g.version) continue;
    const seconds = Math.max(...done.map((s) => s.pull));
    points.push({ version: g.version, value: done.reduce((sum, s) => sum + s.moved, 0) / seconds });
    pulls.set(key, points.slice(-POINTS));
  }
}

function show(overview) {
  const main = document.getElementById("models");
  const cards = overview.models.map(({ model, groups: list, troubles }) => {
    remember(model, list);
    const card = make("section", null, "model");
    card.dataset.model = model.name;
    card.append(make("h2", model.name));
    const facts = make("p", null, "facts");
    const mode = model.policy.mode + (model.policy.mode === "bounded" ? " (lag at most " + model.policy.max_lag + ")" : "");
    const alive = model.producers.filter((p) => p.alive).length;
    facts.append("version ", make("b", model.current ?? "-"), model.held ? " (held; newest " + model.latest + ")" : "",
      ", " + mode + ", " + alive + " of " + model.world_size + " producers, " + model.retention + " kept");
    card.append(facts);
    if (troubles.length) {
      const found = make("ul", null, "troubles");
      troubles.forEach((text) => found.append(make("li", text)));
      card.append(found);
    }
    const parts = make("div", null, "parts");
    const left = make("div"), right = make("div");
    left.append(make("h3", "Groups"), list.length ? groups(model, list) : make("p", "no rollouts yet", "note"));
    left.append(make("h3", "Versions"), versions(model));
    const ready = model.versions.filter((v) => v.ready).slice(-POINTS);
    right.append(make("h3", "Throughput"));
    right.append(chart("published, from opening to ready", ready.map((v) =>
      ({ version: v.version, value: v.nbytes / Math.max(v.ready - v.opened, 1e-6) })), (n) => size(n) + "/s"));
    for (const g of list) {
      const points = pulls.get(model.name + " " + g.group);
      if (points) right.append(chart("pulled by " + g.group, points, (n) => size(n) + "/s", true));
    }
    parts.append(left, right);
    card.append(parts);
    return card;
  });
  main.replaceChildren(...cards);
  document.getElementById("empty").hidden = cards.length > 0;
  document.getElementById("run").textContent = "run " + overview.run;
}

function status(text, kind) {
  const live = document.getElementById("live");
  live.textContent = text;
  live.className = kind;
}

async function ask(path, signal) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  return fetch(path, { headers, signal, cache: "no-store" });
}

function login(message) {
  document.getElementById("login").hidden = false;
  document.getElementById("refused").textContent = message;
  document.getElementById("models").replaceChildren();
  document.getElementById("empty").hidden = true;
  status("a token is wanted", "off");
}

let busy = false, again = false, locked = false;
async function refresh() {
  if (locked) return;
  if (busy) { again = true; return; }
  busy = true;
  try {
    const answer = await ask("/v1/overview", AbortSignal.timeout(10000));
    if (answer.status === 401 || answer.status === 403) {
      locked = true;
      login(token ? (await answer.json()).detail : "");
    } else if (!answer.ok) {
      status("HTTP " + answer.status, "off");
    } else {
      show(await answer.json());
      status("live", "on");
    }
  } catch (error) {
    status("the controller does not answer", "off");
  } finally {
    busy = false;
    if (again) { again = false; setTimeout(refresh, 100); }
  }
}

async function listen() {
  for (;;) {
    if (!locked) {
      try {
        const answer = await ask("/v1/events");
        const reader = answer.ok && answer.body.getReader();
        for (let part = reader && await reader.read(); part && !part.done; part = await reader.read()) refresh();
      } catch (error) { /* asked again below */ }
    }
    await new Promise((next) => setTimeout(next, REFRESH));
  }
}

document.getElementById("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = document.getElementById("token").value.trim();
  sessionStorage.setItem("weightdepot-token", token);
  locked = false;
  document.getElementById("login").hidden = true;
  refresh();
});
refresh();
setInterval(refresh, REFRESH);
listen();

"use strict";
const $ = id => document.getElementById(id);
const show = (id, yes = true) => { $(id).hidden = !yes; };
const percent = p => (100 * p).toFixed(1) + " %";
const BARS = 10, SERIES = 5, LEAST = 0.01, PIECES = 60, SLACK = 0.6;
/* A server that requires a token takes it from the address, #token=..., which browsers do not send. */
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const authorization = token ? { authorization: "Bearer " + token } : {};
let about, job_id = 0, points = [], slots = new Map(), wave = null, socket = null;

function make(parent, name, attributes = {}, text) {
  const space = parent.namespaceURI.includes("svg") ? parent.namespaceURI : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

async function start() {
  const response = await fetch("model", { headers: authorization });
  if (response.status === 401) throw new Error("the server requires a token: add #token=... to the address of this page");
  if (!response.ok) throw new Error("the server answered " + response.status);
  about = await response.json();
  $("name").textContent = document.title = about.name;
  const facts = [about.model, about.parameters.toLocaleString("en") + " parameters"];
  if (about.classes.length) facts.push(about.classes.length + (about.target === "values" ? " values" : " classes"));
  if (about.sample_rate) facts.push((about.length / about.sample_rate).toFixed(1) + " s at " + about.sample_rate / 1000 + " kHz");
  else facts.push("up to " + about.length.toLocaleString("en") + (about.kind === "text" ? " characters" : " positions"));
  if (!about.streams) facts.push("no streaming");
  $("about").textContent = facts.join(" · ");
  $("about").title = about.no_stream || "";
  const typed = ["text", "tokens", "values"].includes(about.kind);
  show("typing", typed); show("drop", !typed); show("input");
  show("second", about.pair);
  if (typed) {
    const words = about.symbols.slice(0, 40).join(" ");
    $("hint").textContent = { tokens: "Symbols, separated by spaces: " + words + (about.symbols.length > 40 ? " …" : ""),
      values: "One position per line: " + about.channels + " number(s), separated by commas.", text: "" }[about.kind];
    $("text-label").textContent = about.generates ? "Prompt" : about.kind === "values" ? "Numbers" : about.pair ? "First text" : "Text";
    if (about.generates) { $("go").textContent = "Generate"; show("sampling"); }
  } else {
    const audio = about.kind === "audio";
    $("drop-text").textContent = audio ? "Drop a recording here" : "Drop an image here";
    $("file").accept = about.kind + "/*";
    show("speak", audio);
    if (audio && !(navigator.mediaDevices && window.MediaRecorder)) {
      $("speak").disabled = true;
      $("speak").title = "browsers allow the microphone over https or on localhost only";
    }
  }
}

/* End the current job and remove its answer. */
function clear() {
  if (socket) socket.close();
  for (const section of ["error", "result", "running", "generated"]) show(section, false);
  points = []; slots = new Map(); wave = null;
  return ++job_id;
}

/* One job at a time: a new job replaces the previous one. */
async function run(job) {
  const id = clear();
  document.body.setAttribute("aria-busy", "true");
  try { await job(() => id === job_id); } catch (error) {
    if (id === job_id) { $("message").textContent = error.message; show("error"); }
  }
  document.body.removeAttribute("aria-busy");
}

async function predict(body, type) {
  const limit = type === "application/json" ? about.max_json : about.max_body;
  if ((body.size ?? body.length) > limit) throw new Error("the input exceeds the limit of " + limit.toLocaleString("en") + " bytes");
  let response;
  try { response = await fetch("predict", { method: "POST", body, headers: { ...authorization, "content-type": type } }); }
  catch { throw new Error("the server does not answer"); }
  const answer = await response.json().catch(() => ({ error: "the server answered " + response.status }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function showAnswer(answer, extra = []) {
  const ranked = Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]);
  $("label").textContent = named(answer.label);
  $("probability").textContent = ranked.length ? percent(ranked[0][1]) : "";
  $("bars").replaceChildren();
  for (const [name, p] of ranked.slice(0, BARS)) {
    const item = make($("bars"), "li");
    make(item, "span", { class: "name", title: named(name) }, named(name));
    make(make(item, "div", { class: "track" }), "div", { class: "fill" }).style.width = 100 * p + "%";
    make(item, "span", { class: "value" }, percent(p));
  }
  const notes = [...extra, ...answer.notes];
  if (ranked.length > BARS) notes.push((ranked.length - BARS) + " less likely classes are not shown");
  $("notes").replaceChildren();
  for (const note of notes) make($("notes"), "li", {}, note);
  show("notes", notes.length > 0);
  show("result");
}

const named = symbol => ({ " ": "space", "\n": "newline" })[symbol] ?? symbol;

/* Send chunks through /stream and draw each answer as it arrives. */
function stream(chunks, current, unit) {
  if (!about.streams || !chunks.length) return Promise.resolve();
  $("unit").textContent = unit;
  return new Promise((done, fail) => {
    let left = chunks.length + 1;
    open((answer) => {
      if (!current()) { socket.close(); return done(); }
      if (answer.error) { socket.close(); return fail(new Error(answer.error)); }
      points.push(answer);
      draw();
      if (--left === 0) { socket.close(); done(); }
    }, () => { for (const chunk of [...chunks, { end: true }]) socket.send(chunk instanceof ArrayBuffer ? chunk : JSON.stringify(chunk)); },
    () => left > 0 && current() ? fail(new Error("the stream was closed by the server")) : done());
  });
}

function open(onMessage, onOpen, onClose) {
  const address = new URL("stream", location.href);
  address.protocol = address.protocol.replace("http", "ws");
  const opened = socket = new WebSocket(address, token ? ["mrconv", token] : []);
  opened.onopen = onOpen;
  opened.onmessage = event => onMessage(JSON.parse(event.data));
  opened.onclose = onClose;
}

function pieces(sequence) {
  const size = Math.max(1, Math.ceil(sequence.length / PIECES)), parts = [];
  for (let i = 0; i < sequence.length; i += size) parts.push(sequence.slice(i, i + size));
  return parts;
}

/* Classes that were once among the most likely keep their colours; the others are not drawn. */
function series() {
  const most = new Map();
  for (const point of points)
    for (const [name, p] of Object.entries(point.probabilities)) most.set(name, Math.max(p, most.get(name) ?? 0));
  for (const [name, p] of [...most].sort((a, b) => b[1] - a[1]).slice(0, SERIES))
    if (p >= LEAST && slots.size < SERIES && !slots.has(name)) slots.set(name, slots.size);
  return slots;
}

function draw(cursor) {
  const svg = $("chart");
  show("running");
  const width = svg.clientWidth || 600, left = 48, right = 8, strip = wave ? 56 : 0, top = 8 + strip, low = 24, height = 200 + strip;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const end = Math.max(about.kind === "audio" ? about.length : 0, points[points.length - 1].position);
  const x = position => left + (width - left - right) * position / end;
  const y = p => top + (height - top - low) * (1 - p);
  if (wave) {
    const n = 300, step = wave.length / n, loudest = wave.reduce((m, v) => Math.max(m, Math.abs(v)), 1);
    const peaks = Array.from({ length: n }, (_, i) => {
      let m = 0;
      for (let j = Math.floor(i * step); j < (i + 1) * step; j++) m = Math.max(m, Math.abs(wave[j]));
      return 0.5 + strip / 2 * 0.8 * m / loudest;
    });
    const edge = sign => peaks.map((m, i) => `${x(i * step)},${strip / 2 + sign * m}`);
    make(svg, "polygon", { class: "wave", points: [...edge(1), ...edge(-1).reverse()].join(" ") });
  }
  for (const p of [0, 0.5, 1]) {
    make(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(p), y2: y(p) });
    make(svg, "text", { x: left - 6, y: y(p) + 4, "text-anchor": "end" }, 100 * p + " %");
  }
  const formatted = position => about.sample_rate ? (position / about.sample_rate).toFixed(2) + " s" : position.toLocaleString("en");
  make(svg, "text", { x: left, y: height - 6 }, formatted(0));
  make(svg, "text", { x: width - right, y: height - 6, "text-anchor": "end" }, formatted(end));
  for (const [name, slot] of series()) {
    const line = points.map(point => `${x(point.position)},${y(point.probabilities[name])}`);
    make(svg, "polyline", { class: "series", points: line.join(" ") }).style.stroke = `var(--s${slot})`;
  }
  const at = cursor === undefined ? points[points.length - 1]
    : points.reduce((a, b) => Math.abs(x(b.position) - cursor) < Math.abs(x(a.position) - cursor) ? b : a);
  if (cursor !== undefined) {
    make(svg, "line", { class: "cursor", x1: x(at.position), x2: x(at.position), y1: 0, y2: height - low });
    const past = x(at.position) > width / 2;
    make(svg, "text", { x: x(at.position) + (past ? -6 : 6), y: top + 10, "text-anchor": past ? "end" : "start" }, formatted(at.position));
  }
  $("legend").replaceChildren();
  for (const [name, slot] of slots) {
    const item = make($("legend"), "li");
    make(item, "i").style.background = `var(--s${slot})`;
    item.append(named(name) + " ");
    make(item, "b", {}, percent(at.probabilities[name]));
  }
  const last = points[points.length - 1];
  svg.setAttribute("aria-label", `After ${formatted(last.position)}: ` +
    [...slots.keys()].map(name => `${named(name)} ${percent(last.probabilities[name])}`).join(", "));
}

function go() {
  const text = $("text").value;
  if (about.generates) return run(current => generate(text, current));
  run(async current => {
    let body, chunks;
    if (about.kind === "values") {
      const values = text.trim().split(/\n+/).filter(Boolean).map(line => line.trim().split(/[\s,;]+/).map(Number));
      if (!values.length || values.some(line => line.some(Number.isNaN))) throw new Error("expected numbers, one position per line");
      body = { values };
      chunks = pieces(values.slice(0, about.length)).map(part => ({ values: part }));
    } else if (about.kind === "tokens") {
      body = { text };
      chunks = pieces(text.split(/\s+/).filter(Boolean).slice(0, about.length)).map(tokens => ({ tokens }));
    } else {
      body = { text };
      chunks = pieces(Array.from(text).slice(0, about.length)).map(part => ({ text: part.join("") }));
    }
    if (about.pair) body.text2 = $("text2").value;
    const answer = await predict(JSON.stringify(body), "application/json");
    if (!current()) return;
    showAnswer(answer);
    await stream(chunks, current, about.kind === "text" ? "the text" : "the sequence");
  });
}

function generate(text, current) {
  $("output").textContent = text;
  show("generated"); show("stop");
  return new Promise((done, fail) => {
    let over = false;
    const end = (act, ...rest) => { over = true; show("stop", false); act(...rest); };
    open(answer => {
      if (!current()) return;
      if (answer.piece !== undefined) $("output").textContent += answer.piece;
      else { end(answer.error ? fail : done, new Error(answer.error)); socket.close(); }
    }, () => socket.send(JSON.stringify({ text, new_tokens: 500, temperature: Number($("temperature").value) })),
    () => { if (!over) end(done); });
  });
}

/* The sampling rate of the training recordings; the model sees every `step`-th sample. */
const rate = () => Math.round(about.sample_rate * about.step);

async function samples(buffer) {
  let audio;
  try { audio = await new OfflineAudioContext(1, 1, rate()).decodeAudioData(buffer); }
  catch { throw new Error("the browser cannot decode this recording"); }
  const mixed = new Float32Array(audio.length);
  for (let c = 0; c < audio.numberOfChannels; c++)
    audio.getChannelData(c).forEach((v, i) => { mixed[i] += v / audio.numberOfChannels; });
  return Int16Array.from(mixed, v => Math.max(-32768, Math.min(32767, Math.round(v * 32768))));
}

function loudest(samples, n) {
  let energy = 0, most = 0, at = 0;
  for (let i = 0; i < samples.length; i++) {
    energy += samples[i] ** 2 - (i >= n ? samples[i - n] ** 2 : 0);
    if (i >= n - 1 && energy > most) { most = energy; at = i - n + 1; }
  }
  return samples.slice(at, at + n);
}

function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, value) => [...value].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate(), true); view.setUint32(28, 2 * rate(), true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, 2 * samples.length, true);
  samples.forEach((v, i) => view.setInt16(44 + 2 * i, v, true));
  return new Blob([view.buffer], { type: "audio/wav" });
}

async function predictAudio(all, pick, current) {
  const used = pick(all, about.length * about.step), seconds = n => (n / rate()).toFixed(2) + " s";
  const answer = await predict(wav(used), "audio/wav");
  if (!current()) return;
  wave = used.filter((_, i) => i % about.step === 0);
  showAnswer(answer, used.length < all.length ? [`${seconds(used.length)} of ${seconds(all.length)} were used`] : []);
  await stream(pieces(wave).map(part => part.slice().buffer), current, "time");
}

async function predictImage(file, current) {
  const address = URL.createObjectURL(file);
  $("image").src = address; show("image");
  const answer = await predict(file, "image/*");
  if (!current()) return;
  showAnswer(answer);
  if (!about.streams) return;
  const image = await createImageBitmap(file), { width, height } = about;
  const scale = Math.max(width / image.width, height / image.height), canvas = new OffscreenCanvas(width, height);
  const pen = canvas.getContext("2d");
  pen.drawImage(image, (width - scale * image.width) / 2, (height - scale * image.height) / 2, scale * image.width, scale * image.height);
  const { data } = pen.getImageData(0, 0, width, height), values = [];
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b] = data.slice(i, i + 3);
    values.push(about.channels === 1 ? [Math.round(0.299 * r + 0.587 * g + 0.114 * b)] : [r, g, b]);
  }
  await stream(pieces(values).map(part => ({ values: part })), current, "the pixels, row by row");
}

function take(file) {
  if (!file) return;
  run(async current => about.kind === "audio"
    ? predictAudio(await samples(await file.arrayBuffer()), (all, n) => all.slice(0, n), current) : predictImage(file, current));
}

function speak() {
  run(async current => {
    let microphone;
    try { microphone = await navigator.mediaDevices.getUserMedia({ audio: true }); }
    catch { throw new Error("no microphone is available, or access was denied"); }
    const recorder = new MediaRecorder(microphone), parts = [], seconds = about.length / about.sample_rate + SLACK;
    recorder.ondataavailable = event => parts.push(event.data);
    const over = new Promise(done => { recorder.onstop = done; });
    recorder.onstart = () => { $("speak").textContent = "Listening…"; setTimeout(() => recorder.stop(), 1000 * seconds); };
    $("speak").disabled = true;
    try {
      recorder.start();
      await over;
    } finally {
      microphone.getTracks().forEach(track => track.stop());
      $("speak").textContent = "Speak"; $("speak").disabled = false;
    }
    await predictAudio(await samples(await new Blob(parts).arrayBuffer()), loudest, current);
  });
}

$("go").onclick = go;
/* The prediction is that of the text before the change. */
for (const id of ["text", "text2"]) $(id).oninput = () => { if (!about.generates) clear(); };
$("stop").onclick = () => socket && socket.close();
$("speak").onclick = speak;
$("temperature").oninput = () => { $("temperature-value").textContent = $("temperature").value; };
$("file").onchange = event => { take(event.target.files[0]); event.target.value = ""; };
$("text").onkeydown = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go(); };
$("drop").ondragover = event => { event.preventDefault(); $("drop").classList.add("over"); };
$("drop").ondragleave = () => $("drop").classList.remove("over");
$("drop").ondrop = event => { event.preventDefault(); $("drop").classList.remove("over"); take(event.dataTransfer.files[0]); };
$("chart").onpointermove = event => draw(event.clientX - $("chart").getBoundingClientRect().left);
$("chart").onpointerleave = () => draw();
window.onresize = () => { if (points.length) draw(); };
start().catch(error => { $("about").textContent = ""; $("message").textContent = error.message; show("error"); });

// Brings the parts together: what is chosen decides what is loaded, what arrives decides what is drawn.

import { announce, byId, h, span } from './dom.js';
import { configTable } from './compare.js';
import { eventList, loadMarks, openEvent } from './events.js';
import { Grid } from './grid.js';
import { listenToKeys, showHelp } from './keys.js';
import { fullName, RunList } from './runs.js';
import { get, Live } from './server.js';
import { change, onChange, readAddress, state } from './state.js';
import { summary } from './summary.js';
import { drawToolbar } from './toolbar.js';
import { language, t } from './words.js';


const infos = new Map(); // run id -> what the server said about it
const failed = new Map(); // run id -> why it could not be read
const list = new RunList();
const grid = new Grid((id) => infos.get(id));
const live = new Live(onMessage, onLine);
let boot = '';

const main = byId('main');
const top_ = h('div', { id: 'top' });
const after = h('div', { id: 'after' });
const blank = (title, ...rest) => h('div', { class: 'blank' }, h('h1', {}, title), rest);
const nameOf = (id) => id.slice(id.indexOf('/') + 1);
const chosen = () => state.runs.map((id) => infos.get(id)).filter(Boolean);

async function begin() {
	readAddress();
	dress();
	if (!globalThis.uPlot) {
		main.replaceChildren(blank(t('noCharts'), h('p', {}, t('noChartsLong'))));
		return;
	}
	main.append(top_, grid.root, after);
	main.addEventListener('marker', (event) => openEvent(event.detail));
	listenToKeys();
	onChange(onState);
	drawToolbar(showHelp);
	const early = state.runs.map(load);
	try {
		await list.load();
	} catch (error) {
		main.replaceChildren(blank(error.message));
		return;
	}
	boot = list.boot;
	await Promise.all(early);
	if (state.runs.length) await showRuns();
	else if (!chooseSomething()) {
		drawTop();
		live.follow([], list.version);
	}
	setInterval(() => document.hidden || drawTop(), 10000);
}

function chooseSomething() {
	if (!list.rows.size) return false;
	const [newest] = [...list.rows.values()].sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
	change({ runs: [newest.id] });
	return true;
}

// ---- what is shown ----

async function load(id) {
	try {
		const info = await get('run', { id });
		infos.set(id, { ...info, name: fullName(info) });
		failed.delete(id);
	} catch (error) {
		failed.set(id, error.message);
	}
}

async function showRuns() {
	const missing = state.runs.filter((id) => !infos.has(id));
	if (missing.length) {
		const slow = setTimeout(() => top_.replaceChildren(blank(t('reading', { name: missing.map(nameOf).join(', ') }))), 150);
		await Promise.all(missing.map(load));
		clearTimeout(slow);
	}
	grid.render();
	drawTop();
	await grid.first; // looking for spikes in a long run would hold it up
	live.follow(state.runs.filter((id) => infos.has(id)), list.version);
	await marks(state.runs);
	drawAfter();
}

async function marks(ids) {
	await Promise.all(ids.filter((id) => infos.has(id)).map(async (id) => {
		await loadMarks(id).catch((error) => console.warn(error.message));
	}));
	grid.redraw(false);
}

function drawTop() {
	const shown = chosen();
	const parts = [];
	if (!list.rows.size && !list.search && !shown.length) {
		const work = list.roots.find((root) => root.work)?.work;
		const command = (line) => h('pre', {}, `z2a ${line}${work ? ` --work ${work}` : ''}`);
		parts.push(blank(t('noRuns'), h('p', {}, t('noRunsLong', { places: list.roots.map((root) => root.label).join(', ') })),
			h('p', {}, t('nextTry')), command('quickstart'), h('p', {}, t('nextTrain')), command('train quickstart')));
	} else if (!state.runs.length) parts.push(blank(t('choose')));
	for (const id of state.runs) {
		if (failed.has(id)) parts.push(h('p', { class: 'notice bad' }, t('readingFailed', { name: nameOf(id), why: failed.get(id) })));
	}
	if (shown.length) parts.push(summary(shown));
	const isOpen = top_.querySelector('details')?.open;
	top_.replaceChildren(...parts);
	if (isOpen) top_.querySelector('details')?.setAttribute('open', '');
}

let drawnAfter = 0;
async function drawAfter() {
	const turn = (drawnAfter += 1);
	const shown = chosen();
	const sections = [];
	const section = (key, title, content) => sections.push(h('section', { class: 'group', data: { group: key } }, h('h2', {}, span('still', title)), content));
	if (shown.length) {
		section('events', t('events'), eventList(shown.map((info) => info.id), (id) => infos.get(id).name, openEvent));
		section('config', t(shown.length > 1 ? 'configDiff' : 'config'), await configTable(shown));
	}
	if (turn === drawnAfter) after.replaceChildren(...sections);
}

function dress() {
	document.documentElement.lang = language() === 'zh' ? 'zh-CN' : 'en';
	if (state.theme) document.documentElement.dataset.theme = state.theme;
	document.querySelector('.skip').textContent = t('skip');
	byId('runs').ariaLabel = t('runs');
	byId('drawer').ariaLabel = t('events');
}

// ---- what changes ----

async function onState(changed) {
	const has = (...names) => names.some((name) => changed.has(name));
	if (has('theme', 'lang')) dress();
	if (has('lang')) {
		list.relabel();
		grid.all((card) => card.chart?.destroy());
		grid.cards.clear();
		grid.render();
		drawAfter();
	}
	if (has('runs', 'base')) list.draw();
	if (has('runs', 'zoom', 'x', 'smooth', 'ylog', 'xlog', 'robust', 'diff', 'theme', 'lang', 'base')) drawToolbar(showHelp);
	if (has('diff') && state.diff && !state.base) change({ base: state.runs[0] });
	if (has('runs')) await showRuns();
	else if (has('q', 'shut', 'wide')) grid.render();
	if (has('wide')) grid.all((card) => card.chart?.resize());
	if (has('x', 'zoom', 'smooth', 'diff', 'base')) grid.refetch();
	else if (has('ylog', 'xlog', 'robust', 'theme')) grid.redraw(true);
	if (has('x')) await marks(state.runs);
	if (has('lang', 'base', 'diff')) drawTop();
}

async function onMessage(message) {
	if (message.boot !== boot) {
		boot = message.boot; // another server: nothing that is known of versions holds
		infos.clear();
		await list.load();
		grid.all((card) => (card.need = 'all'));
		await showRuns();
		return;
	}
	if (message.rows || message.roots) {
		list.merge(message);
		list.version = message.list;
		if (!state.runs.length) chooseSomething();
	}
	const moved = new Set();
	let isOther = false;
	for (const [id, facts] of Object.entries(message.runs ?? {})) {
		const known = infos.get(id);
		if (!known) continue;
		if (facts.version !== undefined && facts.version !== known.version) moved.add(id);
		const isRestart = facts.attempt !== known.attempt;
		const isNew = isRestart || facts.metrics !== known.metrics;
		const isEvent = facts.events !== known.events;
		Object.assign(known, facts);
		if (isNew || isEvent) {
			await load(id);
			isOther ||= isNew;
		}
		if (isEvent) marks([id]).then(drawAfter);
		if (isRestart) grid.all((card) => card.runs.includes(id) && (card.need = 'all'));
	}
	if (isOther) grid.render();
	if (moved.size) grid.moved(moved);
	if (message.runs) drawTop();
}

function onLine(isUp) {
	if (!isUp) announce(t('offline'));
}

begin();

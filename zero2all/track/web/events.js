// What happened in a run: marks for the charts, the list of them, and the drawer with everything about one.

import { button, byId, h, scroll, span } from './dom.js';
import { number, whole } from './format.js';
import { get } from './server.js';
import { change, state } from './state.js';
import { kindName, t } from './words.js';

const LISTED = 200;
const DOCUMENTS = 100;

const marks = new Map(); // run id -> {marks, left_out, axis}

export const marksOf = (id, rank = 9) => (marks.get(id)?.marks ?? []).filter((mark) => mark.rank <= rank);

export async function loadMarks(id) {
	const axis = state.x;
	const found = await get('events', { id, axis });
	if (axis !== state.x) return;
	for (const mark of found.marks) mark.run = id;
	marks.set(id, found);
}

export function eventList(ids, nameOf, open) {
	const all = ids.flatMap((id) => marksOf(id)).sort((a, b) => b.time - a.time);
	const left = ids.reduce((sum, id) => sum + (marks.get(id)?.left_out ?? 0), 0) + Math.max(0, all.length - LISTED);
	if (!all.length) return h('p', { class: 'nothing' }, t('noEvents'));
	const rows = all.slice(0, LISTED).map((mark) =>
		h('li', {}, h('button', { class: 'event', onclick: () => open(mark) },
			span(`sign ${mark.tone}`, mark.sign),
			span('num', whole(mark.step)),
			span('kind', kindName(mark.kind)),
			span('about', mark.kind === 'spike' ? `${mark.metric} ${number(mark.value)}` : (mark.note ?? '')),
			ids.length > 1 && span('of', nameOf(mark.run)))));
	return h('div', {}, h('ol', { class: 'events' }, rows), left > 0 && h('p', { class: 'hint' }, t('eventsLeft', { count: LISTED })));
}

// ---- the drawer ----

const drawer = () => byId('drawer');
let shown = null;
let openedFrom = null;

export const isDrawerOpen = () => !drawer().hidden;

export function closeDrawer() {
	drawer().hidden = true;
	drawer().replaceChildren();
	shown = null;
	openedFrom?.focus?.();
	openedFrom = null;
}

// The next or previous event that matters, over all shown runs.
export function stepEvent(direction) {
	const all = state.runs.flatMap((id) => marksOf(id, 7)).sort((a, b) => a.x - b.x);
	if (!all.length) return;
	const place = shown ? all.findIndex((mark) => mark.run === shown.run && mark.i === shown.i) : direction > 0 ? -1 : 0;
	openEvent(all[(place + direction + all.length) % all.length]);
}

export async function openEvent(mark) {
	if (!isDrawerOpen()) openedFrom = document.activeElement;
	shown = mark;
	const box = drawer();
	box.hidden = false;
	let facts;
	try {
		facts = await get('event', { id: mark.run, i: mark.i });
	} catch (error) {
		facts = { fields: [['', error.message]] };
	}
	if (shown !== mark) return;
	box.replaceChildren(
		h('header', {},
			span(`sign ${mark.tone}`, mark.sign),
			h('h2', { tabIndex: -1 }, `${kindName(mark.kind)} · ${t('step')} ${whole(mark.step)}`),
			button('left', t('previous'), () => stepEvent(-1)),
			button('chevron', t('next'), () => stepEvent(1)),
			button('close', t('close'), closeDrawer)),
		h('p', { class: 'hint' }, [mark.run.slice(mark.run.indexOf('/') + 1), new Date(mark.time * 1000).toLocaleString(), mark.note ?? ''].filter(Boolean).join(' · ')),
		...parts(facts),
		h('button', { class: 'plain', onclick: () => zoomTo(mark) }, t('zoomHere')));
	box.querySelector('h2').focus();
}

function zoomTo(mark) {
	const around = state.x === 'step' ? 200 : Math.max(1, mark.x * 0.02);
	change({ zoom: [Math.max(0, mark.x - around), mark.x + around] });
}

const part = (title, rows, show) => (rows.length ? [h('section', {}, h('h3', {}, title), show(rows))] : []);
const texts = (rows) => h('dl', {}, rows.map(([name, text]) => [h('dt', {}, name), h('dd', {}, text)]));
const pairs = (rows) => h('table', { class: 'pairs' }, h('tbody', {}, rows.map(([name, value]) => h('tr', {}, h('th', { scope: 'row' }, name), h('td', { class: 'num' }, value)))));

function parts({ fields, measures, losses = [], documents = [], around = {} }) {
	const measure = ([word, value]) => [t(word), number(value)];
	return [
		...(measures ? [pairs(measures.map(measure))] : []),
		...part(t('channelLosses'), losses, bars),
		...(measures && !documents.length ? [h('p', { class: 'hint' }, t('noDocuments'))] : part(`${t('documents')} (${documents.length})`, documents, documentTable)),
		...part(t('fields'), fields, texts),
		...part(t('around'), Object.entries(around).map(([name, value]) => [name, number(value)]), pairs),
	];
}

function bars(losses) {
	return h('ul', { class: 'bars' }, losses.map(([name, value]) =>
		h('li', {}, h('span', {}, name), h('i', { vars: { width: `${Math.max(1, (100 * value) / losses[0][1])}%` } }), h('b', {}, number(value)))));
}

function documentTable(documents) {
	const columns = [...new Set(documents.flatMap(Object.keys))].slice(0, 6);
	return scroll(t('documents'), h('table', { class: 'grid' },
		h('thead', {}, h('tr', {}, columns.map((name) => h('th', {}, name)))),
		h('tbody', {}, documents.slice(0, DOCUMENTS).map((each) => h('tr', {}, columns.map((name) => h('td', {}, String(each[name] ?? ''))))))));
}


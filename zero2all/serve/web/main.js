// Brings the parts together: the bar, the facts about the model, and one of the two views.

import { get } from './api.js';
import { Chat } from './chat.js';
import { Continue } from './continue.js';
import { button, byId, h } from './dom.js';
import { count, whole } from './format.js';
import { drawHistory } from './history.js';
import { Panel } from './panel.js';
import { drawSettings, markDefaults } from './settings.js';
import { change, onChange, readState, state, takeUsual } from './state.js';
import { legend } from './tokentext.js';
import { language, t } from './words.js';

const LOOK_EVERY = 5000; // milliseconds between looks at the server's load
const TRY_EVERY = 1500; // the same while something is wrong

readState();
const panel = new Panel();
const chat = new Chat(panel, () => drawHistory(chat));
const text = new Continue(panel);
let model = null;
let load = null;
let problem = '';
let nextLook = 0;
let isLooking = false;

const facts = h('header', { id: 'model' });
const note = h('div'); // above the view
const place = h('div');
const mode = () => state.mode || (!model || model.z2a?.chat === 'template' ? 'chat' : 'continue');
const view = () => (mode() === 'continue' ? text : chat);
const isDark = () => document.documentElement.dataset.theme === 'dark';

// ---- the server ----

async function look() {
	if (document.hidden || isLooking) return;
	isLooking = true;
	clearTimeout(nextLook);
	try {
		if (!model || problem) { // after a pause it may be another one
			const { data } = await get('v1/models');
			model = chat.model = text.model = data[0];
			takeUsual(model.z2a?.sampling);
			drawSettings(model);
			document.title = `${model.id} · ${t('title')}`;
			drawBar();
			drawView();
		}
		load = await get('v1/stats');
		problem = load.status === 'draining' ? t('ending') : '';
	} catch (error) {
		problem = error.status === 0 ? t('noServer') : error.message;
	}
	isLooking = false;
	drawFacts();
	nextLook = setTimeout(look, problem ? TRY_EVERY : LOOK_EVERY);
}

function drawFacts() {
	if (!model) {
		facts.replaceChildren(h('p', problem ? { class: 'notice bad', role: 'alert' } : { class: 'hint' }, problem || t('loading')));
		return;
	}
	const { step, parameters, tokens, max_len, dtype, device } = model.z2a ?? {};
	const known = [
		step > 0 && t('step', { step: whole(step) }),
		parameters && t('parameters', { count: count(parameters) }),
		tokens > 0 && t('trained', { count: count(tokens) }),
		max_len && t('context', { count: whole(max_len) }),
		dtype,
		device,
	];
	facts.replaceChildren(
		h('h1', {}, model.id),
		h('ul', {}, known.filter(Boolean).map((fact) => h('li', {}, fact)), load && h('li', { id: 'load', title: t('loadLong') }, t('load', { running: load.running, waiting: load.waiting }))),
		problem ? h('p', { class: 'notice bad', role: 'alert' }, problem) : '');
}

// ---- the page ----

function drawBar() {
	const choice = (name) => h('button', { role: 'radio', 'aria-checked': String(mode() === name), title: t(`${name}Long`), data: { mode: name }, onclick: () => change({ mode: name }) }, t(name));
	const toggle = (name) => () => document.body.classList.toggle(name);
	byId('bar').replaceChildren(
		button('menu', t('history'), toggle('history-open'), { id: 'menu' }),
		h('a', { class: 'brand', href: '#', 'aria-label': `z2a ${t('title')}` }, h('img', { src: 'web/icon.svg', alt: '', width: 20, height: 20 }), h('span', {}, t('title'))),
		h('div', { class: 'controls' },
			h('div', { class: 'segments', role: 'radiogroup', 'aria-label': t('mode') }, choice('chat'), choice('continue')),
			h('button', { class: 'toggle', 'aria-pressed': String(state.probabilities), title: t('probabilitiesLong'), data: { toggle: 'probabilities' }, onclick: () => change({ probabilities: !state.probabilities }) }, t('probabilities'))),
		h('div', { class: 'corner' },
			h('button', { class: 'plain', id: 'open-settings', onclick: toggle('settings-open') }, t('settings')),
			h('button', { class: 'icon lang', lang: language() === 'zh' ? 'en' : 'zh', onclick: () => change({ lang: language() === 'zh' ? 'en' : 'zh' }) }, t('language')),
			button(isDark() ? 'sun' : 'moon', t('theme'), switchTheme, { data: { tool: 'theme' } })));
}

function switchTheme() {
	const theme = isDark() ? 'light' : 'dark';
	localStorage.setItem('z2a-theme', theme); // the board's too
	document.documentElement.dataset.theme = theme;
	drawBar();
}

function drawView() {
	panel.hide();
	document.body.dataset.mode = mode();
	note.replaceChildren(...(state.probabilities ? [legend()] : []));
	if (place.firstChild !== view().root) place.replaceChildren(view().root); // what has the focus keeps it
	view().draw();
}

function drawAll() {
	document.documentElement.lang = language() === 'zh' ? 'zh-CN' : 'en';
	document.title = `${model?.id ?? 'z2a'} · ${t('title')}`;
	document.querySelector('.skip').textContent = t('skip');
	drawBar();
	drawFacts();
	drawSettings(model);
	drawHistory(chat);
	drawView();
}

function onState(changed) {
	if (changed.has('lang')) drawAll();
	else if (changed.has('mode') || changed.has('probabilities')) {
		drawBar();
		drawView();
	}
	if (changed.has('settings')) markDefaults();
}

function onKey(event) {
	if (event.key !== 'Escape' || event.isComposing) return;
	if (panel.isOpen) panel.hide();
	else if (view().isWriting) view().stop();
	else document.body.classList.remove('history-open', 'settings-open');
}

document.documentElement.dataset.theme = state.theme || document.documentElement.dataset.theme;
byId('main').append(facts, note, place);
onChange(onState);
drawAll();
document.addEventListener('keydown', onKey);
document.addEventListener('click', (event) => {
	if (panel.isOpen && !panel.root.contains(event.target) && !event.target.closest('.token, #text')) panel.hide();
	for (const side of ['history', 'settings']) if (!event.target.closest(`#${side}, #bar`)) document.body.classList.remove(`${side}-open`);
});
document.addEventListener('visibilitychange', look);
addEventListener('pagehide', () => {
	chat.keep();
	text.keep();
});
look();

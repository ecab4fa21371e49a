// The bar on top: search, axis, smoothing, scales, theme, language.

import { button, byId, h, later } from './dom.js';
import { change, state } from './state.js';
import { language, t } from './words.js';

export const AXES = ['step', 'tokens', 'time', 'flops'];
const WIDTHS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

const widthNow = () => Number(state.smooth === 'none' ? 0 : state.smooth.split(':')[1]);
const setWidth = (width) => change({ smooth: width > 0 ? `ema:${width}` : 'none' });

export function stepSmoothing(direction) {
	const width = widthNow();
	const place = WIDTHS.findIndex((each) => each >= width);
	setWidth(WIDTHS[Math.min(WIDTHS.length - 1, Math.max(0, place + direction))]);
}

const isDark = () => document.documentElement.dataset.theme === 'dark';

export function drawToolbar(showHelp) {
	const width = widthNow();
	const search = h('input', {
		type: 'search', id: 'metric-search', value: state.q, placeholder: `${t('findMetric')}  /`, 'aria-label': t('findMetric'),
		autocomplete: 'off', spellcheck: false, oninput: later((event) => change({ q: event.target.value }), 120),
	});
	const axes = h('div', { class: 'segments', role: 'radiogroup', 'aria-label': t('xAxis') }, AXES.map((axis) =>
		h('button', { role: 'radio', 'aria-checked': String(state.x === axis), data: { axis }, onclick: () => change({ x: axis, zoom: null }) }, t(axis))));
	const readout = h('output', {}, width ? String(width) : t('none'));
	const slider = h('input', {
		type: 'range', min: 0, max: WIDTHS.length - 1, value: Math.max(0, WIDTHS.findIndex((each) => each >= width)), 'aria-label': `${t('smoothing')}: ${t('width')}`,
		oninput: (event) => { readout.textContent = WIDTHS[event.target.value] || t('none'); apply(WIDTHS[event.target.value]); },
	});
	const apply = later(setWidth, 120);
	const toggle = (name, label, title = label) =>
		h('button', { class: 'toggle', 'aria-pressed': String(state[name]), title, data: { toggle: name }, onclick: () => change({ [name]: !state[name] }) }, label);
	const bar = byId('bar');
	bar.replaceChildren(
		button('menu', t('runs'), () => document.body.classList.toggle('runs-open'), { id: 'menu' }),
		h('a', { class: 'brand', href: '#', 'aria-label': `z2a ${t('title')}` }, h('img', { src: 'icon.svg', alt: '', width: 20, height: 20 }), h('span', {}, t('title'))),
		search,
		h('div', { class: 'controls' },
			axes,
			h('label', { class: 'smooth' }, h('span', {}, t('smoothing')), slider, readout),
			toggle('ylog', t('logY')),
			toggle('xlog', t('logX')),
			toggle('robust', t('robust')),
			state.runs.length > 1 && toggle('diff', t('diff'), t('diffLong')),
			state.zoom && h('button', { class: 'plain reset', onclick: () => change({ zoom: null }) }, t('resetZoom'))),
		h('div', { class: 'corner' },
			h('a', { class: 'toggle', href: 'studies', target: '_blank' }, t('studies')),
			h('button', { class: 'icon lang', lang: language() === 'zh' ? 'en' : 'zh', onclick: () => change({ lang: language() === 'zh' ? 'en' : 'zh' }) }, t('language')),
			button(isDark() ? 'sun' : 'moon', t('theme'), switchTheme, { data: { tool: 'theme' } }),
			button('help', t('help'), showHelp, { data: { tool: 'help' } })));
}

export function switchTheme() {
	const theme = isDark() ? 'light' : 'dark';
	localStorage.setItem('z2a-theme', theme);
	change({ theme });
}

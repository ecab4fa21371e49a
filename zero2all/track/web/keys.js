// The keyboard: everything the mouse can do with the view.

import { domain } from './chart.js';
import { button, byId, h } from './dom.js';
import { closeDrawer, isDrawerOpen, stepEvent } from './events.js';
import { change, state } from './state.js';
import { AXES, stepSmoothing, switchTheme } from './toolbar.js';
import { t } from './words.js';

const SHORTCUTS = {
	'/': 'findMetric', r: 'findRun', '← →': 'keyPan', '+ −': 'keyIn', 0: 'resetZoom', x: 'xAxis', l: 'logY', '[ ]': 'smoothing',
	c: 'robust', d: 'diffLong', 'n p': 'keyEvents', t: 'theme', Esc: 'close', '?': 'help',
};

export function showHelp() {
	byId('help')?.remove();
	const rows = Object.entries(SHORTCUTS).map(([keys, what]) => h('tr', {}, h('td', {}, keys.split(' ').map((key) => h('kbd', {}, key))), h('td', {}, t(what))));
	const dialog = h('dialog', { id: 'help', 'aria-label': t('help'), onclose: (event) => event.target.remove() },
		h('header', {}, h('h2', {}, t('help')), button('close', t('close'), () => dialog.close())),
		h('table', {}, h('tbody', {}, rows)),
		h('p', { class: 'hint' }, t('keyZoom')));
	document.body.append(dialog);
	dialog.showModal();
}

function move(share, factor) {
	const [low, high] = state.zoom ?? domain.range();
	const middle = (low + high) / 2 + share * (high - low);
	const half = ((high - low) * factor) / 2;
	const [from, to] = domain.range();
	if (factor > 1 && 2 * half >= to - from) change({ zoom: null });
	else change({ zoom: [middle - half, middle + half] });
}

const ACTIONS = {
	'/': () => byId('metric-search').select(),
	r: () => {
		document.body.classList.add('runs-open');
		byId('run-search')?.select();
	},
	ArrowLeft: () => state.zoom && move(-0.2, 1),
	ArrowRight: () => state.zoom && move(0.2, 1),
	'+': () => move(0, 0.5),
	'-': () => move(0, 2),
	0: () => change({ zoom: null }),
	x: () => change({ x: AXES[(AXES.indexOf(state.x) + 1) % AXES.length], zoom: null }),
	l: () => change({ ylog: !state.ylog }),
	'[': () => stepSmoothing(-1),
	']': () => stepSmoothing(1),
	c: () => change({ robust: !state.robust }),
	d: () => state.runs.length > 1 && change({ diff: !state.diff }),
	n: () => stepEvent(1),
	p: () => stepEvent(-1),
	t: switchTheme,
	'?': showHelp,
	Escape: () => {
		if (isDrawerOpen()) closeDrawer();
		else if (document.body.classList.contains('runs-open')) document.body.classList.remove('runs-open');
		else if (state.wide) change({ wide: '' });
		else if (state.zoom) change({ zoom: null });
	},
};

export function listenToKeys() {
	document.addEventListener('keydown', (event) => {
		if (event.ctrlKey || event.metaKey || event.altKey || byId('help')) return;
		const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
		if (typing) {
			if (event.key === 'Escape') event.target.blur();
			return;
		}
		const action = ACTIONS[event.key];
		if (!action) return;
		action();
		event.preventDefault();
	});
}

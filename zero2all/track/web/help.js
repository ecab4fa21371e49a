// The list of keyboard shortcuts.

import { button, byId, h } from './dom.js';
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

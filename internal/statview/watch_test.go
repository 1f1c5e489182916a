package statview

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/lipgloss"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// testWatch returns a view that stops after count intervals.
func testWatch(count int) *watch { return newWatch(context.Background(), time.Millisecond, count, nil) }

// viewOf returns the view of m, which must fit the terminal.
func viewOf(t *testing.T, m *watch) string {
	t.Helper()
	v := m.View()
	if w, h := lipgloss.Width(v), lipgloss.Height(v); w > m.width || h > m.height {
		t.Errorf("view: got %d columns and %d lines, want at most %d and %d:\n%s", w, h, m.width, m.height, v)
	}
	return v
}

func wantIn(t *testing.T, view string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(view, w) {
			t.Errorf("view: got %s\nwant %q in it", view, w)
		}
	}
}

// TestWatchFitsEveryTerminal draws terminals of many sizes.
func TestWatchFitsEveryTerminal(t *testing.T) {
	m := testWatch(0)
	for n := range uint64(300) {
		m.Update(reading{mounts: []control.MountStats{*readingAfter(n + 1)}})
	}
	for width := 1; width < 200; width += 23 {
		for height := 1; height < 80; height += 13 {
			m.Update(tea.WindowSizeMsg{Width: width, Height: height})
			viewOf(t, m)
		}
	}
	m.Update(tea.WindowSizeMsg{Width: 120, Height: 50})
	wantIn(t, viewOf(t, m), "/mnt from host:/export", "MB/s", "requests/s", "99th percentile", "lookup", "7 dd",
		"q quit")
	m.Update(tea.WindowSizeMsg{Width: 80, Height: 24})
	wantIn(t, viewOf(t, m), "/mnt from host:/export", "MB/s", "FUSE REQUEST")
}

// TestWatchShowsOtherMount checks the keys that change the mount, and a mount that ends.
func TestWatchShowsOtherMount(t *testing.T) {
	m := testWatch(0)
	m.Update(tea.WindowSizeMsg{Width: 100, Height: 40})
	a, b := *readingAfter(5), *readingAfter(5)
	a.Dir, b.Dir = "/a", "/b"
	key := func(k tea.KeyType) { m.Update(tea.KeyMsg{Type: k}) }
	m.Update(reading{})
	wantIn(t, viewOf(t, m), "no mounts")
	key(tea.KeyRight)
	m.Update(reading{mounts: []control.MountStats{a, b}})
	wantIn(t, viewOf(t, m), "/a from", "mount 1 of 2")
	key(tea.KeyRight)
	wantIn(t, viewOf(t, m), "/b from", "mount 2 of 2")
	key(tea.KeyRight)
	wantIn(t, viewOf(t, m), "/a from")
	key(tea.KeyLeft)
	wantIn(t, viewOf(t, m), "/b from")
	m.Update(reading{mounts: []control.MountStats{b}})
	wantIn(t, viewOf(t, m), "/b from")
	m.Update(reading{mounts: []control.MountStats{a}})
	wantIn(t, viewOf(t, m), "/a from")
}

// TestWatchKeepsReportWithoutDaemon checks that an error is shown above the last report, and that
// fetch is called again.
func TestWatchKeepsReportWithoutDaemon(t *testing.T) {
	m := testWatch(0)
	m.Update(tea.WindowSizeMsg{Width: 100, Height: 40})
	m.Update(reading{mounts: []control.MountStats{*readingAfter(5)}})
	if _, cmd := m.Update(reading{err: errors.New("connect: no such\x1b file")}); cmd == nil {
		t.Error("after an error: got no command, want a timer")
	}
	wantIn(t, viewOf(t, m), "connect: no such? file; retrying", "/mnt from")
	m.Update(reading{mounts: []control.MountStats{*readingAfter(6)}})
	if v := viewOf(t, m); strings.Contains(v, "retrying") {
		t.Errorf("got %s, want no error", v)
	}
}

// TestWatchPauses checks that a paused view does not change, and that q ends it.
func TestWatchPauses(t *testing.T) {
	m := testWatch(0)
	m.Update(tea.WindowSizeMsg{Width: 100, Height: 40})
	m.Update(reading{mounts: []control.MountStats{*readingAfter(5)}})
	m.Update(tea.KeyMsg{Type: tea.KeySpace, Runes: []rune{' '}})
	before := viewOf(t, m)
	busy := *readingAfter(6)
	busy.Processes[0].Command = "other"
	m.Update(reading{mounts: []control.MountStats{busy}})
	if after := viewOf(t, m); after != before || !strings.Contains(before, "PAUSED") {
		t.Errorf("got %s after %s, want the same and PAUSED", after, before)
	}
	_, cmd := m.Update(tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune{'q'}})
	if cmd == nil || !isQuit(cmd) {
		t.Error("q: got another command, want quit")
	}
}

// TestWatchTellsMountsOfOneDirectoryApart shows a mount that umount --lazy has detached, and a new
// one at the same directory.
func TestWatchTellsMountsOfOneDirectoryApart(t *testing.T) {
	m := testWatch(0)
	m.Update(tea.WindowSizeMsg{Width: 100, Height: 40})
	began := time.Now()
	for n := range uint64(3) {
		old, fresh := *readingAfter(100 + n), *readingAfter(1 + n)
		old.Since, fresh.Since = began, began.Add(time.Minute)
		old.State = control.StateUnmounting
		m.Update(reading{mounts: []control.MountStats{old, fresh}})
	}
	wantIn(t, viewOf(t, m), "/mnt from host:/export: unmounting (mount 1 of 2)")
	m.Update(tea.KeyMsg{Type: tea.KeyRight})
	wantIn(t, viewOf(t, m), "/mnt from host:/export: mounted (mount 2 of 2)")
	for _, h := range m.mounts {
		checkRates(t, &h.report, 1)
	}
}

// TestWatchStopsAfterCount counts intervals: the first reading ends none.
func TestWatchStopsAfterCount(t *testing.T) {
	m := testWatch(2)
	for n, want := range []bool{false, false, true} {
		_, cmd := m.Update(reading{mounts: []control.MountStats{*readingAfter(uint64(n + 1))}})
		if quits := isQuit(cmd); quits != want {
			t.Errorf("reading %d: ends the view is %v, want %v", n, quits, want)
		}
	}
}

func isQuit(cmd tea.Cmd) bool {
	_, quits := cmd().(tea.QuitMsg)
	return quits
}

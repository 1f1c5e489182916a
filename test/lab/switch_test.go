package lab

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A station is a port's other end, without a guest.
type station struct {
	*port
	fd int
}

func newStation(t *testing.T, l *Link) station {
	t.Helper()
	p, err := l.join(netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	s := station{port: p}
	s.plugIn(t)
	return s
}

// plugIn gives the station its cable, for the test.
func (s *station) plugIn(t *testing.T) {
	t.Helper()
	f, err := s.plug()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	s.fd = int(f.Fd())
	for _, o := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, o, &unix.Timeval{Sec: 60}); err != nil {
			t.Fatal(err)
		}
	}
}

var broadcast = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// frame makes a frame.
func (s station) frame(to [6]byte, body string) []byte {
	// 88b5 is for experiments, IEEE 802
	return append(append(append(to[:], s.mac[:]...), 0x88, 0xb5), body...)
}

// put sends a frame by the cable.
func (s station) put(t *testing.T, to [6]byte, body string) {
	t.Helper()
	if _, err := unix.Write(s.fd, s.frame(to, body)); err != nil {
		t.Fatal(err)
	}
}

// pass has the switch take a frame at once: it has gone where it goes afterwards.
func (s station) pass(to [6]byte, body string) { s.link.forward(s.port, s.frame(to, body)) }

// want reads a frame with this body, or none, and does not wait, if it is empty.
func (s station) want(t *testing.T, body string) {
	t.Helper()
	flags := 0
	if body == "" {
		flags = unix.MSG_DONTWAIT
	}
	b := make([]byte, maxFrame)
	n, _, err := unix.Recvfrom(s.fd, b, flags)
	got := ""
	if err == nil {
		got = string(b[ethernetHeader:n])
	} else if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	if got != body {
		t.Errorf("station %v got %.20q (%v), want %.20q", s.addr, got, err, body)
	}
}

// TestSwitch sends frames between three ports without guests.
func TestSwitch(t *testing.T) {
	l := NewLink(t)
	a, b, c := newStation(t, l), newStation(t, l), newStation(t, l)
	jumbo := string(bytes.Repeat([]byte("j"), 65536))
	a.put(t, b.mac, jumbo)
	b.want(t, jumbo)
	c.put(t, a.mac, "back")
	a.want(t, "back")

	a.pass(b.mac, "one")
	b.want(t, "one")
	b.pass(broadcast, "all")
	a.want(t, "all")
	c.want(t, "all")
	a.pass(a.mac, "self")
	l.forward(a.port, []byte("short"))
	none := func() {
		t.Helper()
		for _, s := range []station{a, b, c} {
			s.want(t, "")
		}
	}
	none()

	l.Cut()
	a.pass(b.mac, "lost")
	none()
	l.Restore()
	a.pass(b.mac, "two")
	b.want(t, "two")
	for _, cut := range []*port{a.port, b.port} {
		l.set(&cut.cut, true)
		a.pass(b.mac, "lost")
		b.pass(broadcast, "lost")
		a.want(t, "")
		b.want(t, "")
		l.set(&cut.cut, false)
	}
	c.want(t, "lost") // from b while a was cut
	none()

	b.unplug()
	a.pass(b.mac, "lost")
	b.plugIn(t)
	none()
	a.pass(b.mac, "three")
	b.want(t, "three")
}

// TestSwitchStall holds a port that takes nothing to losing its frames, and only those.
func TestSwitchStall(t *testing.T) {
	l := NewLink(t)
	a, b, c := newStation(t, l), newStation(t, l), newStation(t, l)
	const size, frames = 8192, 4 * portBuffer / 8192
	body := string(bytes.Repeat([]byte("s"), size))
	begin := time.Now()
	for range frames {
		a.put(t, b.mac, body)
	}
	a.put(t, c.mac, "past")
	c.want(t, "past")
	if took := time.Since(begin); took < stallLimit {
		t.Errorf("frames were lost after %v", took)
	}
	kept := 0
	for buf := make([]byte, maxFrame); ; kept++ {
		if _, _, err := unix.Recvfrom(b.fd, buf, unix.MSG_DONTWAIT); err != nil {
			break
		}
	}
	if kept == 0 || kept >= frames {
		t.Errorf("%d of %d frames reached a port that took none", kept, frames)
	}
	a.pass(b.mac, "again")
	b.want(t, "again")
}

// TestAddresses gives out those that nobody chose, and none twice.
func TestAddresses(t *testing.T) {
	l := NewLink(t)
	for _, c := range []struct {
		chosen, want string
		bad          bool
	}{
		{want: "10.9.0.1/24"},
		{chosen: "192.0.2.7/30", want: "192.0.2.7/30"},
		{want: "10.9.0.3/24"},
		{chosen: "10.9.0.3/16", bad: true},
	} {
		var chosen netip.Prefix
		if c.chosen != "" {
			chosen = netip.MustParsePrefix(c.chosen)
		}
		p, err := l.join(chosen)
		if (err != nil) != c.bad {
			t.Fatalf("%+v: %v", c, err)
		}
		if err == nil && p.addr.String() != c.want {
			t.Errorf("%+v: address %v", c, p.addr)
		}
	}
}

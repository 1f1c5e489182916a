package knfsd

import (
	"cmp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// Attribute IDs of messages of InfiniBand's communication manager, which also makes RoCE's
// connections (InfiniBand volume 1, release 1.4, §12.6).
const (
	cmRequest           = 0x10
	cmReply             = 0x13
	cmDisconnectRequest = 0x15
)

// cmConnections returns the start and end times of connections that the communication manager
// makes. It may send each message more than once.
func cmConnections(t *testing.T, w wire, c *lab.Capture) []*connection {
	t.Helper()
	byID := make(map[string]*connection) // by the client's connection ID
	var all []*connection
	for _, dir := range []string{w.to, w.from} { // requests first, which start connections
		for _, f := range frames(t, c, dir+"infiniband.mad.mgmtclass == 0x07", "frame.time_relative",
			"infiniband.mad.attributeid",
			"infiniband.cm.req", "infiniband.cm.rep.remotecommid", "infiniband.cm.dreq.localcommid") {
			seconds, err := strconv.ParseFloat(f[0][0], 64)
			if err != nil {
				t.Fatal(err)
			}
			at := max(time.Duration(seconds*float64(time.Second)), 1)
			first := func(id []string, when func(*connection) *time.Duration) {
				if len(id) == 1 && byID[id[0]] != nil {
					if w := when(byID[id[0]]); *w == 0 {
						*w = at
					}
				}
			}
			switch kind := number(t, f[1][0]); {
			case kind == cmRequest && dir == w.to && byID[f[2][0]] == nil:
				conn := &connection{port: f[2][0], started: at, requested: at}
				byID[f[2][0]] = conn
				all = append(all, conn)
			case kind == cmReply && dir == w.from:
				first(f[3], func(c *connection) *time.Duration { return &c.accepted })
				first(f[3], func(c *connection) *time.Duration { return &c.answered })
			case kind == cmDisconnectRequest && dir == w.to:
				first(f[4], func(c *connection) *time.Duration { return &c.ended })
			}
		}
	}
	slices.SortFunc(all, func(a, b *connection) int { return cmp.Compare(a.started, b.started) })
	return all
}

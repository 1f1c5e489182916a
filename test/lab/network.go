package lab

import (
	"fmt"
	"strings"
	"time"
)

// CutNetwork pulls the guest's network cable: nothing goes either way until RestoreNetwork, and
// neither end is told. Connections of the host are taken meanwhile, but get no answer; what of them
// is left at the end reaches the guest then. Of a guest on a link the cable there is cut too.
func (g *Guest) CutNetwork() error {
	if g.remote != nil {
		return g.remote.do(opCut)
	}
	g.rdma.hold()
	return g.setLink("network cut", false)
}

// RestoreNetwork ends CutNetwork.
func (g *Guest) RestoreNetwork() error {
	if g.remote != nil {
		return g.remote.do(opRestore)
	}
	return g.setLink("network restored", true)
}

func (g *Guest) setLink(what string, up bool) error {
	m, err := g.running()
	if err != nil {
		return err
	}
	g.console.note("%s", what)
	if err := m.qmp.do("set_link", map[string]any{"name": "net0", "up": up}); err != nil {
		return fmt.Errorf("guest %s: %s: %w", g.opts.Name, what, err)
	}
	if g.port != nil {
		g.port.link.set(&g.port.cut, !up)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cut = !up; up {
		g.rdma.release()
	}
	return nil
}

// A Line is a network of a poor kind, in each direction. The zero value is the network as it is.
type Line struct {
	Delay   time.Duration // added to every packet
	KbitSec int           // rate; 0 is unlimited
	LossPct float64       // packets lost, per cent
}

// netem renders l for tc-netem(8).
func (l Line) netem() string {
	var b strings.Builder
	b.WriteString("netem limit 20000")
	if l.Delay > 0 {
		fmt.Fprintf(&b, " delay %dus", l.Delay.Microseconds())
	}
	if l.LossPct > 0 {
		fmt.Fprintf(&b, " loss %g%%", l.LossPct)
	}
	if l.KbitSec > 0 {
		fmt.Fprintf(&b, " rate %dkbit", l.KbitSec)
	}
	return b.String()
}

// SlowNetwork makes the guest's network a poor one, within the guest, until it is called again or
// the guest boots. Losses are between the guest and QEMU's own TCP; the host sees delay and never a
// loss. Of a guest on a link it is the network there.
func (g *Guest) SlowNetwork(l Line) error {
	if g.remote != nil {
		return g.remote.ask(remoteRequest{Op: opSlow, Line: l}).Err.unpack()
	}
	card := "eth0"
	if g.Linked.IsValid() {
		card = "eth1"
	}
	// What comes in has no queue of its own to shape: it takes a detour over ifb0.
	script := `
		tc qdisc del dev ` + card + ` root 2>/dev/null
		tc qdisc del dev ` + card + ` ingress 2>/dev/null
		ip link del ifb0 2>/dev/null
		true`
	if l != (Line{}) {
		script += `
		set -e
		modprobe -a sch_netem sch_ingress cls_matchall act_mirred
		modprobe ifb numifbs=0
		ip link add ifb0 type ifb
		ip link set ifb0 up
		tc qdisc add dev ifb0 root ` + l.netem() + `
		tc qdisc add dev ` + card + ` ingress
		tc filter add dev ` + card + ` ingress matchall action mirred egress redirect dev ifb0
		tc qdisc add dev ` + card + ` root ` + l.netem()
	}
	_, err := g.Run(script)
	if err == nil {
		g.console.note("network is now %+v", l)
	}
	return err
}

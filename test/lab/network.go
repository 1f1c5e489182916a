package lab

import (
	"fmt"
	"strings"
	"time"
)

// CutNetwork drops all of the guest's traffic until RestoreNetwork; no connection is closed. The
// host can still connect but gets no reply, and RestoreNetwork forwards the connections that are
// still open. The guest's card eth0 loses its carrier. For a guest on a link, CutNetwork also cuts
// its port there, while eth1 stays up.
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

// An Impairment describes a slow or lossy network, for each direction. The zero value changes
// nothing.
type Impairment struct {
	Delay   time.Duration // added to every packet
	KbitSec int           // rate in kbit/s; 0 is unlimited
	LossPct float64       // lost packets in percent
}

// netem returns i as arguments of tc-netem(8).
func (i Impairment) netem() string {
	var b strings.Builder
	b.WriteString("netem limit 20000")
	if i.Delay > 0 {
		fmt.Fprintf(&b, " delay %dus", i.Delay.Microseconds())
	}
	if i.LossPct > 0 {
		fmt.Fprintf(&b, " loss %g%%", i.LossPct)
	}
	if i.KbitSec > 0 {
		fmt.Fprintf(&b, " rate %dkbit", i.KbitSec)
	} else {
		b.WriteString(" rate 1000gbit") // a change without a rate would keep the rate
	}
	return b.String()
}

// SlowNetwork impairs the guest's network, inside the guest, until the next call or boot. Losses
// occur between the guest and QEMU's TCP, so the host sees delays but no losses. For a guest on a
// link it impairs the link instead.
func (g *Guest) SlowNetwork(i Impairment) error {
	if g.remote != nil {
		return g.remote.ask(remoteRequest{Op: opSlow, Impairment: i}).Err.unpack()
	}
	card := "eth0"
	if g.Linked.IsValid() {
		card = "eth1"
	}
	// Linux does not shape incoming traffic, so the script redirects it through ifb0. Later calls
	// change the parameters in place: packets that are sent while a queue discipline is added or
	// deleted fail, and then rxe can put its queue pair for connection messages into the error
	// state for ever.
	script := `
		set -e
		if ! tc qdisc show dev ` + card + ` root | grep -q netem; then
			modprobe -a sch_netem sch_ingress cls_matchall act_mirred
			modprobe ifb numifbs=0
			ip link add ifb0 type ifb
			ip link set ifb0 up
			tc qdisc add dev ifb0 root netem
			tc qdisc add dev ` + card + ` ingress
			tc filter add dev ` + card + ` ingress matchall action mirred egress redirect dev ifb0
			tc qdisc add dev ` + card + ` root netem
		fi
		tc qdisc change dev ifb0 root ` + i.netem() + `
		tc qdisc change dev ` + card + ` root ` + i.netem()
	_, err := g.Run(script)
	if err == nil {
		g.console.note("network is now %+v", i)
	}
	return err
}

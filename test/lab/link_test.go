package lab_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// mountLinked returns a shell command that mounts another guest's export over RDMA, with the
// kernel's client.
func mountLinked(server *lab.Guest) string {
	return fmt.Sprintf("modprobe -a nfs nfsv3 && mount -t nfs %s %v:/export /mnt && "+
		"grep ' /mnt nfs .*proto=rdma' /proc/mounts", kernelOptions, server.Linked)
}

// TestLink joins two guests by a link. One mounts the other's export over RoCE, with the kernel's
// client.
func TestLink(t *testing.T) {
	link := lab.NewLink(t)
	begin := time.Now()
	guests := lab.StartAll(t,
		lab.Options{Name: "client", Provider: lab.RXE, Link: link, MemoryMiB: 512, CPUs: 1},
		lab.Options{Name: "server", Provider: lab.RXE, Link: link, MemoryMiB: 512, CPUs: 1})
	client, server := guests[0], guests[1]
	t.Logf("both served after %v", time.Since(begin).Round(time.Millisecond))
	if client.Linked.String() != "10.9.0.1" || server.Linked.String() != "10.9.0.2" {
		t.Errorf("got addresses %v and %v, want 10.9.0.1 and 10.9.0.2", client.Linked, server.Linked)
	}
	if out := client.MustRun("rdma link"); !strings.Contains(out, "netdev eth1") {
		t.Errorf("got RDMA links %s, want eth1", out)
	}
	t.Run("frames", func(t *testing.T) { testLinkFrames(t, link, client, server) })
	t.Run("capture", func(t *testing.T) { testLinkCapture(t, client, server) })
	t.Run("outages", func(t *testing.T) { testLinkOutages(t, link, client, server) })
}

// Options of ping: two packets, two jumbo packets, one packet, and two packets that are expected to
// get lost.
const (
	small = "-W 60 -c 2"
	large = "-W 60 -c 2 -s 8900"
	one   = "-W 60 -c 1"
	lost  = "-W 5 -c 2"
)

// reaches reports whether a ping gets a reply.
func reaches(from, to *lab.Guest, ping string) bool {
	_, err := from.RunFor(fmt.Sprintf("ping %s %v", ping, to.Linked), 5*time.Minute)
	return err == nil
}

func testLinkFrames(t *testing.T, link *lab.Link, client, server *lab.Guest) {
	if !reaches(client, server, small) || !reaches(server, client, large) {
		t.Fatal("ping: got no reply")
	}
	link.Cut()
	if reaches(client, server, lost) {
		t.Error("ping over a cut link: got a reply")
	}
	link.Restore()
	if !reaches(client, server, small) {
		t.Error("ping over a restored link: got no reply")
	}
	if err := server.CutNetwork(); err != nil {
		t.Fatal(err)
	}
	if reaches(client, server, lost) {
		t.Error("ping of a guest with a cut network: got a reply")
	}
	if err := server.RestoreNetwork(); err != nil {
		t.Fatal(err)
	}
	if !reaches(client, server, small) {
		t.Error("ping of a guest with a restored network: got no reply")
	}
	const delay = 300 * time.Millisecond
	if err := server.SlowNetwork(lab.Impairment{Delay: delay}); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if reached := reaches(client, server, one); !reached || time.Since(begin) < 2*delay {
		t.Errorf("ping over the slow network: got reply %v after %v, want at least two delays of %v", reached,
			time.Since(begin), delay)
	}
	if err := server.SlowNetwork(lab.Impairment{}); err != nil {
		t.Fatal(err)
	}
	// Send more over TCP than the switch can buffer.
	client.MustRun(fmt.Sprintf(`set -e
		modprobe -a nfs nfsv3
		mount -t nfs -o tcp,vers=3,nolock,mountport=20048,mountproto=tcp %v:/export /mnt
		dd if=/dev/urandom of=/tmp/f bs=1M count=32 2>/dev/null
		cp /tmp/f /mnt/tcp
		umount /mnt`, server.Linked))
	if got, want := server.MustRun("md5sum </export/tcp"), client.MustRun("md5sum </tmp/f; rm /tmp/f"); got != want {
		t.Errorf("got a file with sum %q on the server, want %q", got, want)
	}
}

func testLinkCapture(t *testing.T, client, server *lab.Guest) {
	atServer, atClient := server.Capture(t, "server"), client.Capture(t, "client")
	const calls = 8
	client.MustRun(mountLinked(server) + fmt.Sprintf(`
		set -e
		dd if=/dev/urandom of=/tmp/f bs=1M count=2 2>/dev/null
		cp /tmp/f /mnt/f
		for i in $(seq %d); do touch /mnt/f; done
		echo 3 >/proc/sys/vm/drop_caches
		cmp /tmp/f /mnt/f
		umount /mnt`, calls))
	server.MustRun("test -s /export/f")
	for _, c := range []*lab.Capture{atServer, atClient} {
		if err := c.Stop(); err != nil {
			t.Fatal(err)
		}
		for filter, want := range map[string]int{
			"infiniband.mad.attributeid == 0x0010":               1, // ConnectRequest
			"udp.dstport == 4791 && rpcordma && rpc.msgtyp == 0": calls,
			"udp.dstport == 4791 && rpcordma && rpc.msgtyp == 1": calls,
			// WRITE, whose data is in RDMA Reads
			"nfs.procedure_v3 == 7 && nfs.count3 == 1048576": 2,
		} {
			out, err := c.Tshark("-Y", filter)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(out, "\n"); n < want {
				t.Errorf("%s: got %d packets for filter %s, want at least %d", c.File, n, filter, want)
			}
		}
		if out, err := c.Malformed(); err != nil || out != "" {
			t.Errorf("got malformed packets (error %v): %s", err, out)
		}
	}
}

// outageLimit bounds I/O that waits for a guest's boot and for the kernel client's pauses between
// connects.
const outageLimit = 15 * time.Minute

// testLinkOutages checks that I/O of the kernel's client resumes after a cut link and after a power
// failure of the server.
func testLinkOutages(t *testing.T, link *lab.Link, client, server *lab.Guest) {
	client.MustRun(mountLinked(server) + " && dd if=/dev/urandom of=/tmp/f bs=1M count=4 2>/dev/null")
	defer client.Run("umount -f -l /mnt")
	for _, outage := range []struct {
		name       string
		begin, end func() error
	}{
		{"cut", func() error { link.Cut(); return nil }, func() error { link.Restore(); return nil }},
		{"power", func() error { server.PowerOff(); return nil }, server.Boot},
	} {
		if err := outage.begin(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := client.RunFor("cp /tmp/f /mnt/"+outage.name+" && sync /mnt/"+outage.name+" && cat /mnt/"+
				outage.name+" | cmp - /tmp/f", outageLimit)
			done <- err
		}()
		select {
		case err := <-done:
			t.Errorf("%s: I/O ended during the outage, error %v", outage.name, err)
			continue
		case <-time.After(2 * time.Second):
		}
		begin := time.Now()
		if err := outage.end(); err != nil {
			t.Fatal(err)
		}
		back := time.Since(begin)
		if err := <-done; err != nil {
			t.Errorf("%s: %v", outage.name, err)
		}
		t.Logf("%s: outage ended after %v, I/O after %v", outage.name, back.Round(time.Millisecond),
			time.Since(begin).Round(time.Millisecond))
		if got, want := server.MustRun("md5sum </export/"+outage.name), client.MustRun("md5sum </tmp/f"); got != want {
			t.Errorf("%s: got a file with sum %q on the server, want %q", outage.name, got, want)
		}
	}
}

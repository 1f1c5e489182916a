package restart

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// checkReleased checks that nothing is left of what the workers did. They have no file open.
func (r *rig) checkReleased() {
	r.t.Helper()
	kit.Succeeds(r.t, "release of all resources", func() error {
		if err := kit.DropNames(r.dir); err != nil {
			return err
		}
		m, err := r.scrape()
		if err == nil {
			err = m.released(r.starts - 1)
		}
		if err == nil {
			err = r.checkDescriptors()
		}
		return err
	})
}

// descriptors counts the open files of the daemon and of the holder by kind.
func (r *rig) descriptors() map[string]int {
	r.t.Helper()
	counts := make(map[string]int)
	number := regexp.MustCompile(`[0-9]+`)
	holder := mounts.HolderOf(r.t, r.socket)
	for name, pid := range map[string]int{"daemon": r.daemon.Cmd.Process.Pid, "holder": holder} {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil || len(files) == 0 {
			r.t.Fatalf("descriptors of the %s, process %d: got none, %v", name, pid, err)
		}
		for _, f := range files {
			if target, err := os.Readlink(f); err == nil { // otherwise it was just closed
				counts[name+" "+number.ReplaceAllString(target, "N")]++
			}
		}
	}
	return counts
}

// spareSockets is how many sockets the daemon may have more than after the mount: connections to
// the lock service, of metrics and of commands.
const spareSockets = 4

func (r *rig) checkDescriptors() error {
	for kind, n := range r.descriptors() {
		most := r.before[kind]
		if kind == "daemon socket:[N]" {
			most += spareSockets
		}
		if n > most {
			return fmt.Errorf("%d descriptors %s, %d after the mount", n, kind, r.before[kind])
		}
	}
	return nil
}

// samples are the metrics of the mount by name and own label: NAME or NAME{VALUE}.
type samples map[string]float64

var sampleLine = regexp.MustCompile(`^nfsrdmad_(\w+)\{(.*)\} (\S+)$`)
var ownLabel = regexp.MustCompile(`(?:state|table)="([^"]*)"`)

// scrape returns the metrics of the daemon.
func (r *rig) scrape() (samples, error) {
	client := http.Client{Timeout: kit.Timeout, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + r.metrics + "/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	all := make(samples)
	in := bufio.NewScanner(resp.Body)
	for in.Scan() {
		f := sampleLine.FindStringSubmatch(in.Text())
		if f == nil {
			continue
		}
		v, err := strconv.ParseFloat(f[3], 64)
		if err != nil {
			return nil, err
		}
		if label := ownLabel.FindStringSubmatch(f[2]); label != nil {
			all[f[1]+"{"+label[1]+"}"] = v
		} else {
			all[f[1]] = v
		}
	}
	return all, in.Err()
}

// lostLookups is how many nodes a restart may leave: those of LOOKUPs in flight.
const lostLookups = 20

// released checks that no call, no lock, no memory region and no open file is in use.
func (m samples) released(restarts int) error {
	// A daemon that was killed soon after its start may not have continued the mount.
	if n := m["mount_restores_total"]; n > float64(restarts) || n < float64(min(restarts, 1)) {
		return fmt.Errorf("got mount_restores_total %v after %d restarts", n, restarts)
	}
	zero := strings.Fields("mrs_orphaned_total nodes_without_record_total calls_in_flight calls_queued slots_in_use " +
		"locks_held locks_pending locks_lost_total write_errors_total panics_total bad_reply_total")
	for _, table := range strings.Fields("files dirs hidden extents requests lockowners lockranges") {
		zero = append(zero, "state_records{"+table+"}")
	}
	mrs := 0.0
	for _, s := range memreg.States {
		name := "mrs{" + s.String() + "}"
		mrs += m[name]
		if s != memreg.Invalid {
			zero = append(zero, name)
		}
	}
	for _, name := range zero {
		if v, ok := m[name]; !ok || v != 0 {
			return fmt.Errorf("got %s %v (exported: %t), want 0", name, v, ok)
		}
	}
	if mrs != m["mrs_pooled"] || mrs == 0 {
		return fmt.Errorf("the sum of the MRs over all states is %v, but mrs_pooled is %v", mrs, m["mrs_pooled"])
	}
	if n := m["state_records{nodes}"]; n > float64(lostLookups*restarts) {
		return fmt.Errorf("got %v records of nodes after %d restarts", n, restarts)
	}
	return nil
}

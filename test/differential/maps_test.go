package differential

import (
	"os"
	"path/filepath"
	"testing"
)

// TestSetIDBitsAreClearedOnlyByUsersMappings checks in which context our side must clear set-id
// bits, and in which it must not.
func TestSetIDBitsAreClearedOnlyByUsersMappings(t *testing.T) {
	const user, byRoot = "open path=a as=1 flags=0x42 mode=0666\n", "open path=a flags=0x42 mode=0666\n"
	const mapped = "pwrite n=10 seed=1\nmmap n=4096 flags=0x1\nchmod path=a mode=06755\n"
	const again, other = "open path=a flags=0x2\n", "open path=b flags=0x42\nwrite n=10\n" // in the same slot
	const second = "open path=a fd=1 flags=0x2\nmmap fd=1 n=4096 flags=0x1\n"              // by root
	const last = "mwrite n=10 seed=2 as=1"
	for name, c := range map[string]struct {
		ops    string
		clears bool // our side clears the bits in the last operation
		show   bool
		want   string // field of the difference
	}{
		"user's mapping":                {user + mapped + last, true, false, ""},
		"user's mapping, bits stay":     {user + mapped + last, false, false, "fd.mode"},
		"root's mapping":                {byRoot + mapped + last, true, false, "fd.mode"},
		"root's mapping, bits stay":     {byRoot + mapped + last, false, false, ""},
		"opened again by root":          {user + mapped + again + last, true, false, ""},
		"other file in slot":            {user + mapped + other + last, true, false, ""},
		"other file in slot, bits stay": {user + mapped + other + last, false, false, "a"},
		"two users' mappings":           {user + mapped + second + last, true, false, ""}, // skipped
		"two users' mappings, shown":    {user + mapped + second + last, true, true, "a"},
		"two mappings of root":          {byRoot + mapped + second + last, true, false, "fd.mode"},
		"two users' mappings, two files": {user + mapped + "open path=b fd=1 flags=0x42\nmmap fd=1 n=4096\n" + last,
			false, false, "fd.mode"},
		"write(2) of root":      {byRoot + "chmod path=a mode=06755\npwrite n=9", true, false, "fd.mode"},
		"user's mapping, shown": {user + mapped + last, true, true, "a"}, // the final look; permits fd.mode
		"root's mapping, shown": {byRoot + mapped + last, true, true, "fd.mode"},
	} {
		t.Run(name, func(t *testing.T) {
			p := localPair(t)
			p.LikeNFS, p.keepGoing = true, c.show
			ops, err := ParseOps(c.ops)
			if err != nil {
				t.Fatal(err)
			}
			p.distort = func(o *Op, fields []Field) {
				if *o != ops[len(ops)-1] || !c.clears {
					return
				}
				if err := os.Chmod(filepath.Join(p.Ours.Server, p.dir, "a"), 0o755); err != nil {
					t.Fatal(err)
				}
				for i := range fields {
					if fields[i] == (Field{"fd.mode", "106755"}) {
						fields[i].Value = "100755"
					}
				}
			}
			got := ""
			if found := runText(t, p, c.ops); found != nil {
				got = found.field
			}
			if got != c.want {
				t.Errorf("got difference %q, want %q", got, c.want)
			}
		})
	}
}

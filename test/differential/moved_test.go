package differential

import "testing"

// TestStaleRenameOnlyAfterMoveOnOtherMount checks in which context a rename may return ESTALE.
func TestStaleRenameOnlyAfterMoveOnOtherMount(t *testing.T) {
	const back, on = "rename path=e/d to=d", "\nrename path=d to=f by=1"
	const begin = "mkdir path=d quiet=1\nmkdir path=e quiet=1\n"
	for name, c := range map[string]struct {
		ops  string
		want string // field of the difference
	}{
		"moved on the other mount": {"rename path=d to=e/d\nrename path=e/d to=f by=1", ""},
		"moved by both":            {"rename path=d to=e/d by=1\n" + back + on, ""},
		"moved back":               {"rename path=d to=e/d\n" + back + " by=1" + on, "errno"},
		"replaced":                 {"mkdir path=g\nrename path=d to=f\nrename path=g to=f by=1", ""},
		"moved on the same mount":  {"rename path=d to=e/d by=1\nrename path=e/d to=f by=1", "errno"},
		"other directory moved":    {"mkdir path=g\nrename path=g to=h" + on, "errno"},
		"not moved":                {"rename path=d to=e/d by=1", "errno"},
		"failed move":              {"rename path=d to=missing/d" + on, "errno"},
		"file moved": {"open path=a flags=0x42\nrename path=a to=d/a\nrename path=d/a to=a by=1",
			"errno"},
	} {
		t.Run(name, func(t *testing.T) {
			p := localPair(t)
			p.LikeNFS, p.Processes = true, []Process{&local{}, &local{}}
			p.Ours.Dirs = append(p.Ours.Dirs, p.Ours.Dirs[0])
			ops, err := ParseOps(begin + c.ops)
			if err != nil {
				t.Fatal(err)
			}
			p.distort = func(o *Op, fields []Field) {
				if *o == ops[len(ops)-1] {
					fields[0].Value = "ESTALE"
				}
			}
			got := ""
			if found := runText(t, p, begin+c.ops); found != nil {
				got = found.field
			}
			if got != c.want {
				t.Errorf("got difference %q, want %q", got, c.want)
			}
		})
	}
}

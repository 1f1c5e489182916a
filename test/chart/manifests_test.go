package chart

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	storage "k8s.io/api/storage/v1"
	kyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const deployDir = "../../deploy/kubernetes"

var update = flag.Bool("update", false, "write the manifests that the chart renders")

// render returns the files of the chart with the given values, by the name of the template.
func render(t *testing.T, values map[string]any) map[string]string {
	t.Helper()
	chart, err := loader.LoadDir(filepath.Join(deployDir, "chart"))
	if err != nil {
		t.Fatal(err)
	}
	v, err := chartutil.ToRenderValues(chart, values,
		chartutil.ReleaseOptions{Name: "nfsrdmad", Namespace: "nfsrdmad", IsInstall: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Engine{Strict: true}.Render(chart, v)
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for name, text := range files {
		if text = strings.TrimSpace(text); text != "" {
			out[path.Base(name)] = text + "\n"
		}
	}
	return out
}

// The plain manifests are the chart with its default values. "go test -run Rendered . -update" in
// this directory writes them.
func TestManifestsAreRendered(t *testing.T) {
	all := render(t, map[string]any{"createNamespace": true, "podMonitor": map[string]any{"enabled": true}})
	header := "# Rendered from deploy/kubernetes/chart. Change the chart, not this file.\n"
	monitor := all["podmonitor.yaml"]
	delete(all, "podmonitor.yaml")
	first := all["namespace.yaml"]
	delete(all, "namespace.yaml")
	plain := first
	for _, name := range slices.Sorted(maps.Keys(all)) {
		plain += "---\n" + all[name]
	}
	for file, want := range map[string]string{"nfsrdmad.yaml": header + plain, "podmonitor.yaml": header + monitor} {
		file = filepath.Join(deployDir, file)
		if *update {
			if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s is not what the chart renders (%v); run go test -run Rendered . -update in test/chart",
				file, err)
		}
	}
}

// decode decodes manifests into the types of Kubernetes. It refuses unknown fields.
func decode(t *testing.T, source string, manifests []byte) (objects []any) {
	t.Helper()
	reader := kyaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(manifests)))
	defer reader.Close()
	for {
		doc := make([]byte, 1<<20)
		n, err := reader.Read(doc)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		doc = doc[:n]
		var kind struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal(doc, &kind); err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		object := newObject(kind.APIVersion + " " + kind.Kind)
		if object == nil {
			t.Errorf("%s: unknown object %+v", source, kind)
			continue
		}
		text, err := yaml.YAMLToJSONStrict(doc)
		if err != nil {
			t.Fatalf("%s: %v", source, err)
		}
		// Names of fields are case-sensitive, as in the API server.
		if unknown, err := json.UnmarshalStrict(text, object); err != nil || len(unknown) > 0 {
			t.Errorf("%s: %s: %v, %v", source, kind.Kind, err, unknown)
		}
		objects = append(objects, object)
	}
}

func newObject(kind string) any {
	switch kind {
	case "v1 Namespace":
		return &core.Namespace{}
	case "v1 ServiceAccount":
		return &core.ServiceAccount{}
	case "v1 PersistentVolume":
		return &core.PersistentVolume{}
	case "v1 PersistentVolumeClaim":
		return &core.PersistentVolumeClaim{}
	case "v1 Pod":
		return &core.Pod{}
	case "apps/v1 DaemonSet":
		return &apps.DaemonSet{}
	case "apps/v1 Deployment":
		return &apps.Deployment{}
	case "storage.k8s.io/v1 CSIDriver":
		return &storage.CSIDriver{}
	case "storage.k8s.io/v1 StorageClass":
		return &storage.StorageClass{}
	case "rbac.authorization.k8s.io/v1 ClusterRole":
		return &rbac.ClusterRole{}
	case "rbac.authorization.k8s.io/v1 ClusterRoleBinding":
		return &rbac.ClusterRoleBinding{}
	case "rbac.authorization.k8s.io/v1 Role":
		return &rbac.Role{}
	case "rbac.authorization.k8s.io/v1 RoleBinding":
		return &rbac.RoleBinding{}
	case "monitoring.coreos.com/v1 PodMonitor":
		return &monitoring.PodMonitor{}
	}
	return nil
}

// The chart renders valid objects that fit together, for all switches of its values.
func TestManifestsAreValid(t *testing.T) {
	const driver = "csi.nfsrdmad.github.io"
	for _, tt := range []struct {
		name   string
		values map[string]any
		want   int // objects
	}{
		{"defaults", nil, 9},
		{"all", map[string]any{"createNamespace": true, "podMonitor": map[string]any{"enabled": true,
			"labels": map[string]any{"release": "prometheus"}},
			"imagePullSecrets": []any{map[string]any{"name": "pull"}},
			"node":             map[string]any{"nodeSelector": map[string]any{"rdma": "yes"}}}, 11},
		{"daemon of the host", map[string]any{"daemon": map[string]any{"enabled": false},
			"podMonitor": map[string]any{"enabled": true}}, 9},
	} {
		t.Run(tt.name, func(t *testing.T) {
			accounts, used := map[string]bool{}, map[string]bool{}
			n := 0
			for name, text := range render(t, tt.values) {
				for _, object := range decode(t, name, []byte(text)) {
					n++
					switch o := object.(type) {
					case *core.ServiceAccount:
						accounts[o.Name] = true
					case *storage.CSIDriver:
						if o.Name != driver {
							t.Errorf("got driver %s, want %s", o.Name, driver)
						}
					case *apps.DaemonSet:
						used[o.Spec.Template.Spec.ServiceAccountName] = true
						checkPod(t, &o.Spec.Template, o.Spec.Selector.MatchLabels)
						want := map[string]bool{"daemon": tt.name != "daemon of the host", "csi": true,
							"node-driver-registrar": true, "liveness-probe": true}
						for name, present := range want {
							if got := containerOf(&o.Spec.Template, name) != nil; got != present {
								t.Errorf("container %s: present %v, want %v", name, got, present)
							}
						}
					case *apps.Deployment:
						used[o.Spec.Template.Spec.ServiceAccountName] = true
						checkPod(t, &o.Spec.Template, o.Spec.Selector.MatchLabels)
					case *rbac.ClusterRoleBinding:
						used[o.Subjects[0].Name] = true
					case *rbac.RoleBinding:
						used[o.Subjects[0].Name] = true
					}
				}
			}
			if n != tt.want {
				t.Errorf("got %d objects, want %d", n, tt.want)
			}
			if !maps.Equal(accounts, used) {
				t.Errorf("service accounts %v, but pods and roles use %v", accounts, used)
			}
		})
	}
	for _, file := range []string{"examples/storageclass.yaml", "examples/static.yaml"} {
		b, err := os.ReadFile(filepath.Join(deployDir, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range decode(t, file, b) {
			if o, ok := object.(*storage.StorageClass); ok && o.Provisioner != driver {
				t.Errorf("%s: got provisioner %s, want %s", file, o.Provisioner, driver)
			}
			if o, ok := object.(*core.PersistentVolume); ok && o.Spec.CSI.Driver != driver {
				t.Errorf("%s: got driver %s, want %s", file, o.Spec.CSI.Driver, driver)
			}
		}
	}
}

func containerOf(pod *core.PodTemplateSpec, name string) *core.Container {
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == name {
			return &pod.Spec.Containers[i]
		}
	}
	return nil
}

// checkPod checks that the parts of a pod fit together, and that our containers can mount.
func checkPod(t *testing.T, pod *core.PodTemplateSpec, selector map[string]string) {
	t.Helper()
	for k, v := range selector {
		if pod.Labels[k] != v {
			t.Errorf("the selector wants the label %s=%s; the pod has %q", k, v, pod.Labels[k])
		}
	}
	used := map[string]bool{}
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		for _, m := range c.VolumeMounts {
			used[m.Name] = true
			wants := m.Name == "kubelet"
			p := m.MountPropagation
			if got := p != nil && *p == core.MountPropagationBidirectional; got != wants {
				t.Errorf("container %s, volume %s: bidirectional propagation %v, want %v", c.Name, m.Name, got, wants)
			}
			if wants && (c.SecurityContext == nil || !*c.SecurityContext.Privileged) {
				t.Errorf("container %s has bidirectional propagation, but is not privileged", c.Name)
			}
		}
		checkFlags(t, c)
	}
	for _, v := range pod.Spec.Volumes {
		if !used[v.Name] {
			t.Errorf("volume %s is not used", v.Name)
		}
		delete(used, v.Name)
	}
	if len(used) > 0 {
		t.Errorf("the pod has no volumes %v", used)
	}
}

// checkFlags checks that our program has the flags of a container.
func checkFlags(t *testing.T, c *core.Container) {
	t.Helper()
	if c.Name != "daemon" && c.Name != "csi" {
		return
	}
	run := exec.Command("go", "run", "./cmd/nfsrdmad", c.Name, "--help")
	run.Dir = "../.."
	help, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("nfsrdmad %s --help: %v\n%s", c.Name, err, help)
	}
	flags := 0
	for _, arg := range c.Args {
		name, _, ok := strings.Cut(arg, "=")
		if !ok || !strings.HasPrefix(name, "--") {
			continue
		}
		if flags++; !strings.Contains(string(help), name+" ") {
			t.Errorf("container %s: nfsrdmad %s has no flag %s", c.Name, c.Name, name)
		}
	}
	if flags < 4 {
		t.Errorf("container %s: found %d flags", c.Name, flags)
	}
}
